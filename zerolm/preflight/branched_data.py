"""The data of a branch: what it changes becomes a blend of the mixture, from the branch point on.

A source continues where the trunk stopped reading it. Must not write.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.checkpoint.directory import Checkpoint
from zerolm.common.errors import ConfigError
from zerolm.common.url import is_url
from zerolm.common.values import parse_number
from zerolm.config.settings import BEST_FIT, Settings, split_weight
from zerolm.data.mixture import blends_from_record
from zerolm.data.order import Blend, Order, num_windows
from zerolm.data.quotas import block_size, exact_shares
from zerolm.data.skips import used_sequences_end
from zerolm.data.sources import open_sources, source_names
from zerolm.ds_config.profile import block
from zerolm.shards.reader import Source

ORDER_SETTINGS = frozenset({"seed", "packing", "later_seq_len", "data_stage"})


def without(settings: Settings, name: str) -> Settings:
    """Return the settings as if the setting `name` had not been given."""
    origins = {key: where for key, where in settings.origins.items() if key != name}
    given, inherited = settings.explicit - {name}, settings.inherited - {name}
    settings = replace(settings, explicit=given, inherited=inherited, origins=origins)
    return replace(settings, **dict[str, Any]({name: None}))


class _Trunk(NamedTuple):
    """What the trunk has read at the branch point.

    Attributes:
        data: its `--data`.
        order: `run_record.data_order` of its checkpoint.
        end: it has consumed or skipped all sequence numbers below this.
        position: the next sequence number.
        blends: its data blends.
    """

    data: Sequence[str]
    order: Mapping[str, Any]
    end: int
    position: int
    blends: Sequence[Blend]

    @classmethod
    def at(cls, checkpoint: Checkpoint, data: Sequence[str], blends: Sequence[Blend]) -> "_Trunk":
        progress, order = checkpoint.progress, checkpoint.manifest.get("order", {})
        end = used_sequences_end(progress.position, progress.skipped_windows)
        return cls(data, order, end, progress.position, blends)

    @property
    def blend(self) -> Blend:
        """The blend at the branch point."""
        return [each for each in self.blends if each.start < max(1, self.end)][-1]


def with_mixture(
    settings: Settings, trunk: Mapping[str, Any], checkpoint: Checkpoint, where: str
) -> Settings:
    """Return the settings with any change of data, temperature or sequence length as a mixture
    blend.

    The blend starts at the first mixing block after the branch point, because earlier blocks must
    equal the trunk's. A new sequence length changes all blocks, so the blend then starts at the
    branch point.

    Args:
        where: prefix for messages, which names the branch.

    Raises:
        ConfigError: the unread windows of the new length cannot be determined.
    """
    order, seq_len = checkpoint.manifest.get("order", {}), settings.seq_len
    recorded, old = block(trunk, "mixture").get("stages"), block(trunk, "settings")
    is_longer = seq_len != order.get("seq_len", seq_len)
    settings = _fitting(settings, is_longer)
    old_data, temperature = old.get("data") or [], old.get("mixture_temperature")
    is_same = list(settings.data) == old_data and settings.mixture_temperature == temperature
    own_order = (settings.explicit - settings.inherited) & ORDER_SETTINGS
    if (is_same and not is_longer) or own_order or not recorded or seq_len is None:
        return settings
    if is_longer and (why := _length_problem(settings, order, trunk)):
        raise ConfigError(
            f"{settings.where('seq_len')}: {seq_len}, but the sequences of {where} have "
            f"{order['seq_len']} tokens: {why} Or give another --seed: this reorders all data, so "
            "text that the trunk has read may be read again."
        )
    read = _Trunk.at(checkpoint, old_data, blends_from_record(recorded))
    new = _weights(settings, read, is_same=is_same, is_longer=is_longer)
    if new is None:
        return settings  # reported when the data is checked
    added = (0.0,) * (len(new) - len(old_data))
    shares = exact_shares([*read.blend.weights, *added], allow_zero=True)
    if exact_shares(list(new.values()), allow_zero=True) == shares and not is_longer:
        return replace(settings, data=tuple(old_data), mixture_temperature=temperature)
    weights = (*read.blends[0].weights, *added)
    data = tuple(f"{path}={weight!r}" for path, weight in zip(new, weights, strict=True))
    settings = replace(settings, data=data, mixture_temperature=None)
    sources = open_sources(settings, []).training
    if len(sources) != len(new):
        return settings  # reported when the data is checked
    origin = settings.where("seq_len" if is_longer else "data")
    return replace(
        settings,
        data_stage=_blends(settings, read, sources, new, shares, is_same, is_longer),
        origins={**settings.origins, "data_stage": origin},
        explicit=settings.explicit - {"mixture_temperature"} | {"data_stage"},
    )


def _fitting(settings: Settings, is_longer: bool) -> Settings:
    """Return the settings without inherited ones that do not fit the given weights or length."""
    unfit = set()
    if any(_path(spec) != spec for spec in settings.data):
        unfit.add("mixture_temperature")
    if is_longer and (settings.later_seq_len or 0) % (settings.seq_len or 1):
        unfit.add("later_seq_len")
    for name in unfit & settings.inherited:
        settings = without(settings, name)
    if is_longer:  # token counts of earlier blends refer to windows of the old length
        specs = (re.sub(r"@\d+", "", spec) for spec in settings.data_stage)
        settings = replace(settings, data_stage=tuple(specs))
    return settings


def _weights(
    settings: Settings, read: _Trunk, *, is_same: bool, is_longer: bool
) -> dict[str, float] | None:
    """Return {path: weight} from the branch point on, beginning with the trunk's sources; None if
    a source cannot be opened.
    """
    paths = {_same_path(_path(spec)): _path(spec) for spec in read.data}
    if is_same:
        return dict(zip(paths.values(), read.blend.weights, strict=True))
    problems: list[str] = []
    given = open_sources(replace(settings, data_stage=()), problems)
    if problems and is_longer:
        raise ConfigError(problems)
    if problems or len(given.weights) != len(settings.data):
        return None
    new = dict.fromkeys(paths.values(), 0.0)
    for spec, weight in zip(settings.data, given.weights, strict=True):
        new[paths.setdefault(_same_path(_path(spec)), _path(spec))] = weight
    return new


def _blends(
    settings: Settings,
    read: _Trunk,
    sources: Sequence[Source],
    new: Mapping[str, float],
    shares: Sequence[Any],
    is_same: bool,
    is_longer: bool,
) -> tuple[str, ...]:
    """Return `--data_stage` with the blend that begins at the branch point."""
    seq_len, begun = settings.seq_len or 1, max(1, read.end)
    consumed = [""] * len(sources)
    if is_longer:
        start = -(-read.position * read.order["seq_len"] // seq_len)  # as `run_record.carry_over`
        counts = _consumed(seq_len, read.order, read.end, sources)
        consumed, begun = [f"@{count}" for count in counts], start
    else:
        # A single source has no mixing blocks, so it can continue anywhere.
        size, first = block_size(shares) if len(read.data) > 1 else 1, read.blend.start
        start = first + -(-max(1, read.end - first) // size) * size
    named = [
        f"{name}={weight!r}{count}"
        for name, weight, count in zip(source_names(sources), new.values(), consumed, strict=True)
        if weight or count.strip("@0")
    ]
    begins = {_blend_start(spec, seq_len): spec for spec in settings.data_stage}
    earlier = [spec for begin, spec in begins.items() if begin < begun]
    later = [spec for begin, spec in begins.items() if begin > start] if is_same else []
    return (*earlier, f"{start * seq_len}:{','.join(named)}", *later)


def _length_problem(settings: Settings, order: Mapping[str, Any], trunk: Mapping[str, Any]) -> str:
    """Return why windows of a new length cannot continue the trunk's data order, and how to fix
    that.

    Returns "" if they can continue it.

    Args:
        order: `run_record.data_order` of the trunk's checkpoint.
    """
    seq_len, before = settings.seq_len or 1, order["seq_len"]
    if BEST_FIT in (settings.packing, order["packing"]):
        return "packed rows of another length have different contents. Keep the length."
    if order["data_fingerprint"] != trunk.get("data_fingerprint"):
        return "the trunk's data has changed since that step. Branch from a later step."
    if seq_len % before:
        return f"this does not divide {seq_len}. Choose {2 * before}, for example."
    if order.get("group", 1) * before % seq_len:
        return (
            "the trunk reads them in random order, so few windows of the new length are unread. "
            f"Branch from a run with --later_seq_len {seq_len}."
        )
    return ""


def _consumed(
    seq_len: int, order: Mapping[str, Any], end: int, sources: Sequence[Source]
) -> list[int]:
    """Count for each source the windows of the new length that the trunk has at least partly read.

    These windows come first in the new order. The last window of a source may be read only in part,
    and if the trunk has begun a mixing block, some of its windows may not have been read at all.

    Args:
        order: `run_record.data_order` of the trunk's checkpoint.
        end: the trunk has consumed or skipped all sequence numbers below this.
    """
    before, weights = order["seq_len"], order["weights"]
    sizes = [num_windows(source.num_tokens, before) for source in sources[: len(weights)]]
    later = blends_from_record(order.get("stages", []))
    read = Order(sizes, weights, order["seed"], blends=later, group=order.get("group", 1))
    consumed = [-(-count * before // seq_len) for count in read.ends(end).tolist()]
    return consumed + [0] * (len(sources) - len(weights))


def _path(spec: str) -> str:
    """Return the path in a `--data` value."""
    return split_weight(spec)[0]


def _same_path(path: str) -> str:
    """Return the canonical form of a path."""
    return path if is_url(path) else str(Path(path).resolve())


def _blend_start(spec: str, seq_len: int) -> int:
    """Return the sequence number at which the blend in a `--data_stage` value starts."""
    return -(-int(parse_number(spec.partition(":")[0])) // seq_len)
