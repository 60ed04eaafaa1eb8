"""Check on a small copy that a row's logits depend on nothing but the row.

They may depend neither on the other rows of its micro-batch, which change with
`--micro_batch_size` and the number of ranks, nor on the attention kernel. With `--document_mask`
the rows consist of several documents. `model_proof` must have found no problem.
"""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import Findings, reason
from zerolm.common.values import shown
from zerolm.config.settings import Settings
from zerolm.model.architecture import ConfigKey, causal_lm_class, has_padding_position
from zerolm.model.document_mask import unsupported_reason
from zerolm.model.model import Model, max_positions, position_limit
from zerolm.preflight.model_proof import (
    NEEDS_DEVICE,
    SEEN,
    computable_copy,
    kernels,
    trial_tokens,
)
from zerolm.preflight.remedies import remedies

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Rotary embeddings whose factors transformers chooses by the largest position in a batch. "dynamic"
# would too, but only above max_position_embeddings, and a longer --seq_len is refused.
ROPE_BY_LENGTH = "longrope"
DEPENDS = "on --micro_batch_size and the number of ranks"


@dataclass(frozen=True)
class _Copy:
    """A small copy of a run's model, and the rows that it gets.

    Attributes:
        tokens: in a row.
        last: last position of the longest document; None without `--document_mask`.
    """

    config: "PretrainedConfig"
    tokens: int
    last: int | None

    @property
    def default(self) -> str:
        return kernels(self.config)[0]

    def row_difference(self, *, training: bool = True) -> float:
        from zerolm.preflight import trial_rows

        return trial_rows.row_difference(
            self.config, self.default, self.tokens, self.last, training=training
        )


def check(model: Model, settings: Settings, found: Findings) -> None:
    """Compare the logits of a small copy, and add problems and notices to `found`.

    The kernel is compared if it was chosen by hand and is not refused for another reason.
    """
    from zerolm.preflight.observed_model import quiet  # imports torch

    config, kernel = model.config, settings.attn_implementation
    where = settings.where("attn_implementation")
    chosen = kernel != "auto" and not any(line.startswith(where) for line in found.problems)
    default = kernels(config)[0]
    if settings.document_mask and unsupported_reason(config, causal_lm_class(config), default):
        return  # refused by `model_rules`
    with quiet():
        try:
            copy = _copy(config, settings)
        except Exception:  # any class: `model_proof` has reported it
            return
        _compare_rows(copy, settings, model.path, found)
        if chosen and kernel != default:
            _compare_kernels(copy, settings, model.path, found)


def _copy(config: "PretrainedConfig", settings: Settings) -> _Copy:
    from zerolm.preflight.observed_model import without_noise

    small, tokens = computable_copy(ConfigKey.of(config), trial_tokens(settings.seq_len))
    small, tokens = without_noise(small), min(tokens, settings.seq_len or tokens)
    if not settings.document_mask:
        return _Copy(small, tokens, None)
    if limit := position_limit(config):
        setattr(small.get_text_config(), *limit)  # rotary frequencies may depend on it
    longest = min(settings.seq_len or tokens, max_positions(config) or math.inf)
    if has_padding_position(config):  # positions are computed from the ids
        longest = tokens
    return _Copy(small, tokens, max(tokens, int(longest)) - 1)


def _compare_rows(copy: _Copy, settings: Settings, path: str, found: Findings) -> None:
    """Compare rows in one micro-batch with the same rows in a micro-batch each."""
    try:
        largest = copy.row_difference()
    except Exception as error:  # any class: it depends on the config's values
        found.notices.append(
            f"{path}: rows are not proven to be independent of each other: a small copy of the "
            f"model cannot be computed ({reason(error)})"
        )
        return
    if largest <= SEEN:
        return
    change = f"the logits of a row change by {largest:.2g} of their standard deviation with the"
    if copy.row_difference(training=False) <= SEEN:
        found.notices.append(
            f"{path}: in training, but not in evaluation, {change} other rows of its micro-batch, "
            f"for example because experts are drawn at random: the loss curve depends {DEPENDS}"
        )
        return
    where = settings.where("document_mask")
    for key, kind, length in _ropes_by_length(copy) if copy.last is not None else ():
        found.problems.append(
            f"{path}: {key}: {shown(kind)}: the frequencies depend on the longest document of a "
            f"micro-batch: with --document_mask ({where}) {change} documents of other rows, so the "
            f"loss curve would depend {DEPENDS}. Remove --document_mask, or use --seq_len {length} "
            "or less."
        )
        return
    keys = remedies(
        copy.config, lambda changed: replace(copy, config=changed).row_difference() <= SEEN
    )
    fixes = [f"{one.key} {shown(one.right)}" for one in keys] or ["another model_type"]
    found.problems.append(
        f"{path}: {change} other rows of its micro-batch, so the loss curve would depend "
        f"{DEPENDS}. Use {', or '.join(fixes)}."
    )


def _ropes_by_length(copy: _Copy) -> Iterator[tuple[str, str, int]]:
    """Yield key, type and threshold of rotary embeddings without which rows are independent."""

    def kinds(prefix: str, rope: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(rope, dict):
            if rope.get("rope_type") == ROPE_BY_LENGTH:
                yield f"{prefix}.rope_type", rope
            for key, value in rope.items():
                yield from kinds(f"{prefix}.{key}", value)

    changed = deepcopy(copy.config)
    text = changed.get_text_config()
    given = getattr(text, "rope_parameters", None)
    found = [(key, deepcopy(rope)) for key, rope in kinds("rope_parameters", given)]
    for _, rope in kinds("rope_parameters", given):
        rope["rope_type"] = "default"
    if not found or replace(copy, config=changed).row_difference() > SEEN:
        return
    for key, rope in found:
        length = rope.get("original_max_position_embeddings") or max_positions(copy.config)
        yield key, rope["rope_type"], int(length or 0)


def _compare_kernels(copy: _Copy, settings: Settings, path: str, found: Findings) -> None:
    """Compare a kernel chosen by hand with the default of a CPU."""
    from zerolm.preflight.trial_rows import kernel_difference

    kernel, where = settings.attn_implementation, settings.where("attn_implementation")
    rows = "rows with --document_mask" if settings.document_mask else "rows"
    try:
        largest = kernel_difference(copy.config, copy.default, kernel, copy.tokens, copy.last)
    except Exception as error:  # any class: transformers' functions refuse what they do not support
        # Some families define their code for flash attention only if the package is installed.
        if NEEDS_DEVICE.search(str(error)) or isinstance(error, NameError):
            found.notices.append(
                f"{where}: {kernel}: not compared with {copy.default} on a small copy of the model "
                f"({reason(error)})"
            )
            return
        found.problems.append(
            f"{where}: {kernel} cannot compute {rows} of this model ({reason(error)}; {path}). Use "
            "auto."
        )
        return
    if largest > SEEN:
        found.problems.append(
            f"{where}: {kernel} computes another function than {copy.default}: for {rows} of a "
            f"small copy of the model, logits differ by {largest:.2g} of their standard deviation "
            f"({path}). Use auto."
        )
