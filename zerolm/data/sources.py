"""Opens a run's sources, derives their weights and names, and checks that they fit the model.

Reads manifests and packing indices, but no tokens.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zerolm.common.errors import ConfigError, ShardError, did_you_mean
from zerolm.common.url import is_url
from zerolm.config.settings import BEST_FIT, Settings, split_weight
from zerolm.data.mixture import temperature_weights
from zerolm.data.order import num_windows
from zerolm.data.packing import open_packing
from zerolm.data.quotas import exact_shares
from zerolm.shards.manifest import MANIFEST
from zerolm.shards.overlap import Contents
from zerolm.shards.reader import Source, open_source

COLON_WEIGHT = re.compile(r"(.+):([0-9.]+)")  # other programs' syntax for a source's weight


class Sources(NamedTuple):
    """A run's opened sources, and the weights of the training sources in the first blend."""

    training: list[Source]
    weights: list[float]
    validation: list[Source]


def open_sources(settings: Settings, problems: list[str]) -> Sources:
    """Open the sources of `--data` and `--val_data`; append a problem for each failure.

    Weights that are not given are the token counts to the power of 1 / `--mixture_temperature`.
    """
    specs = _parse_data(settings, problems)
    training = _open("data", specs, problems)
    validation = _open("val_data", [(path, None) for path in settings.val_data], problems)
    return Sources(training, _weights(settings, specs, training, problems), validation)


def _parse_data(settings: Settings, problems: list[str]) -> list[tuple[str, float | None]]:
    """Parse each `--data` value into (path, weight); the weight is None if it is not given."""
    where = settings.where("data")
    specs: list[tuple[str, float | None]] = []
    for spec in settings.data:
        colon = COLON_WEIGHT.fullmatch(spec)
        if colon and not Path(spec).exists() and Path(colon[1]).is_dir():
            problems.append(
                f"{where}: {spec}: a weight follows an equals sign. Write {colon[1]}={colon[2]}."
            )
            continue
        path, weight = split_weight(spec)
        before, equals, _ = spec.rpartition("=")
        if equals and weight is None and not is_url(spec):
            if not Path(spec).exists():
                problems.append(
                    f"{where}: {spec}: its weight is not a number. Write for example {before}=0.7."
                )
                continue
            if Path(before).exists() and not spec.endswith("/"):
                problems.append(
                    f"{where}: {spec}: {before} exists, too. Write {spec}/ for this directory, or "
                    f"{before}/={spec[len(before) + 1 :]} for a weight."
                )
        if weight is not None and (weight < 0 or (weight == 0 and not settings.data_stage)):
            problems.append(
                f"{where}: {spec}: a weight must be above 0. Correct it, or remove the source."
            )
        specs.append((path, weight))
    return specs


def _open(
    flag: str, specs: Sequence[tuple[str, float | None]], problems: list[str]
) -> list[Source]:
    sources = []
    for path, weight in specs:
        try:
            sources.append(open_source(path))
        except ShardError as error:
            has_weight = is_url(path) and weight is not None
            hint = "; a name with an equals sign must end with /" if has_weight else ""
            problems += [f"{problem} (--{flag}{hint})" for problem in error.problems]
    return sources


def _weights(
    settings: Settings,
    specs: Sequence[tuple[str, float | None]],
    training: Sequence[Source],
    problems: list[str],
) -> list[float]:
    """Return the training sources' weights, given by the user or derived from their sizes."""
    where = settings.where("data")
    weights = [weight for _, weight in specs if weight is not None]
    num_given = len(weights)
    if num_given < len(specs):
        if num_given:
            unweighted = next(path for path, weight in specs if weight is None)
            problems.append(
                f"{where}: {unweighted} has no weight, but other sources do. Give all sources a "
                "weight, or none for shares by size."
            )
        sizes = [source.num_tokens for source in training]
        weights = temperature_weights(sizes, settings.mixture_temperature or 1.0)
    if settings.mixture_temperature not in (None, 1) and num_given:
        problems.append(
            f"{settings.where('mixture_temperature')}: {settings.mixture_temperature:g} derives "
            f"weights from sizes, but --data gives weights. Remove one of them "
            f"(--no-mixture_temperature)."
        )
    if len(weights) == len(training) and min(weights, default=0) >= 0 and any(weights):
        if 0 in weights and not settings.data_stage:
            return weights  # reported by _parse_data
        try:
            exact_shares(weights, where, allow_zero=bool(settings.data_stage))
        except ConfigError as error:
            problems += error.problems
    return weights


def source_problems(
    sources: Sources, settings: Settings, vocab_size: int | None, seq_len: int | None
) -> list[str]:
    """Check every source against the model, the sequence length and the other sources.

    Checks whose arguments are not yet known, and therefore None, are skipped.
    """
    problems: list[str] = []
    everything = [("data", source) for source in sources.training]
    everything += [("val_data", source) for source in sources.validation]
    seen: dict[str, tuple[str, Source]] = {}
    longest = max(seq_len or 0, settings.later_seq_len or 1)
    for flag, source in everything:
        manifest = source.directory / MANIFEST
        if vocab_size is not None and source.vocab_size > vocab_size:
            problems.append(
                f"{manifest}: vocab_size: {source.vocab_size} must not exceed the model's "
                f"vocab_size {vocab_size} ({settings.model_config}). Raise the model's, or "
                "tokenize with the model's tokenizer."
            )
        if seq_len and settings.packing == BEST_FIT:
            try:
                packing = open_packing(source, seq_len)
                if os.environ.get("LOCAL_RANK", "0") == "0":  # one process per node
                    problems += [f"{line} (--{flag})" for line in packing.damage()]
                    problems += [
                        f"{line} Then run `zerolm data pack` again. (--{flag})"
                        for line in source.index_problems()
                    ]
            except ShardError as error:
                problems += [f"{problem} (--{flag})" for problem in error.problems]
        elif seq_len and num_windows(source.num_tokens, seq_len) < 1:
            problems.append(
                f"{manifest}: num_tokens: {source.num_tokens} must be at least --seq_len + 1 = "
                f"{seq_len + 1} for one sequence. Lower --seq_len, or add data."
            )
        elif seq_len and flag == "data" and num_windows(source.num_tokens, longest) < 1:
            problems.append(
                f"{manifest}: num_tokens: {source.num_tokens} must be at least --later_seq_len + "
                f"1 = {longest + 1}. Lower --later_seq_len, or add data."
            )
        problems += _tokenizer_problems(source, everything[0][1])
        if source.fingerprint in seen:
            other_flag, other = seen[source.fingerprint]
            why = "validation data must be held out" if other_flag != flag else "give it once"
            problems.append(
                f"{settings.where(flag)}: {source.directory} contains the same tokens as "
                f"--{other_flag} {other.directory}: {why}. Remove one of them."
            )
        seen.setdefault(source.fingerprint, (flag, source))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        problems += overlap_problems(sources, settings)
    return problems


def overlap_problems(sources: Sources, settings: Settings, *, if_equal: bool = False) -> list[str]:
    """Return a problem for each pair of sources in which validation documents are trained on.

    Args:
        if_equal: also for pairs with the same tokens, which `source_problems` reports.
    """
    training = [Contents(source) for source in sources.training]
    return [
        f"{settings.where('val_data')}: {held_out.source.directory} has documents of "
        f"{shared} that --data {each.source.directory} has too, so they "
        "would not be held out. Tokenize both parts by one command (--val_fraction with "
        "--val_output), or take both from one `zerolm data split`."
        for held_out in map(Contents, sources.validation)
        for each in training
        if (if_equal or each.source.fingerprint != held_out.source.fingerprint)
        and (shared := each.shared_input(held_out)) is not None
    ]


def _tokenizer_problems(source: Source, first: Source) -> list[str]:
    if source.bos_id != first.bos_id:
        return [
            f"{source.directory / MANIFEST}: bos_id: {source.bos_id} must equal that of "
            f"{first.directory}, {first.bos_id}: documents must begin alike. Tokenize both with "
            "--bos, or both without."
        ]
    ours, theirs = (each.head["tokenizer"]["fingerprint"] for each in (source, first))
    if ours == theirs:
        return []
    return [
        f"{source.directory / MANIFEST}: tokenizer.fingerprint: {ours[:16]} must equal that of "
        f"{first.directory}, {theirs[:16]}: their ids come from different tokenizers. Tokenize "
        "both with the same one."
    ]


def source_names(sources: Sequence[Source]) -> list[str]:
    """Return a unique name for each source: its directory's name, with parents if necessary."""
    parts = [
        (source.directory if source.is_remote else source.directory.absolute()).parts
        for source in sources
    ]
    depth = 1
    while len({path[-depth:] for path in parts}) < len(parts) and depth < max(map(len, parts)):
        depth += 1
    return ["_".join(part.strip("/") for part in path[-depth:]) for path in parts]


def find_source(name: str, sources: Sequence[Source]) -> int:
    """Find a source by its unique name, directory name or path, and return its index.

    Raises:
        ValueError: no source or several sources have that name.
    """
    names = source_names(sources)
    if name in names:
        return names.index(name)
    matches = [
        number
        for number, source in enumerate(sources)
        if name in (source.directory.name, str(source.directory))
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        candidates = " or ".join(names[number] for number in matches)
        raise ValueError(f"is the name of several sources. Write {candidates}.")
    raise ValueError(
        f"names no source.{did_you_mean(name, names)} The sources are: {', '.join(names)}."
    )
