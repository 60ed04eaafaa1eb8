"""Check on a small copy of a model that it works as a causal language model.

No position may attend to a later token, each must depend on its own and the previous token, and
every parameter must get a finite gradient in the first steps. With a valid config.json a model can
violate any of these rules while the run looks normal. Copies run in float32 on the CPU, so
`--check` needs no GPU. Messages name keys and values that would fix the problem (`remedies`).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from zerolm.common import family_sources
from zerolm.common.errors import ConfigError, Findings, RecordError, reason
from zerolm.common.provenance import installed_version
from zerolm.common.values import shown
from zerolm.config.settings import Settings
from zerolm.model.architecture import (
    ConfigKey,
    causal_lm_class,
    is_routed_expert,
    parameter_shapes,
)
from zerolm.model.model import Model, max_positions
from zerolm.preflight.remedies import Remedy, remedies
from zerolm.preflight.small_copy import shallow_config, small_copies
from zerolm.run_dir.records import find_run_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zerolm.preflight.observed_model import Sight

    Sights = dict[str, list[Sight]]  # kernel: one per batch

RECORD_KEY = "model_proof"  # in run.json
TOKENS = 24  # in a row
LONGER = 128  # for model parts that matter only at long distances, such as compressed keys
LONGEST = 512  # for families that run only at the sequence length of the training run
# Smallest change of a logit that counts, relative to the logits' standard deviation. Of 181
# families with large weights (transformers 5.23, torch 2.13, 2026-11-26), 179 had no change at
# earlier positions, and all had a change of at least 1e-3 somewhere at the next position.
SEEN = 1e-4
# Threshold for |gradient| * |parameter|, the effect of a relative parameter change on the loss.
# With large weights it is at least 2e-4; for a gradient that consists only of rounding errors, it
# is at most 6e-8.
NO_GRADIENT = 1e-6
HIGH_LOSS = 3.0  # relative to log(vocabulary size), the loss of uniform predictions
OTHERWISE = "Correct the config.json, or use another model_type"
# Errors that other packages' kernels raise for CPU tensors; such errors are not the model's fault.
NEEDS_DEVICE = re.compile(r"is_cuda|triton|cpu tensor|cuda|hip\b|nvidia|device type", re.IGNORECASE)
SHAPES = re.compile("broadcast|must match|cannot be multiplied|invalid for input of size")
NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class Finding:
    """A problem found in a model.

    Attributes:
        text: a clause that describes the problem.
        refuses: whether the run is refused; otherwise it is a notice.
        keys: config keys with new values, each of which would fix the problem by itself.
    """

    text: str
    refuses: bool = True
    keys: tuple[Remedy, ...] = ()

    def line(self, path: str) -> str:
        """Return the message for the user, which states the file, key, value, problem and fix."""
        if not self.keys:
            return f"{path}: {self.text}" + f". {OTHERWISE}." * self.refuses
        first, *others = self.keys
        values = [f"Use {shown(first.right)}", *(f"{k.key} {shown(k.right)}" for k in others)]
        fix = ", or ".join(values)
        return f"{path}: {first.key}: {shown(first.value)}: {self.text}. {fix}" + "." * self.refuses


class _NotComputableError(Exception):
    """The model cannot run at all; `__cause__` is the error."""


def check(model: Model, seq_len: int | None, found: Findings) -> None:
    """Check a model on a small copy of it, and add its problems and notices to `found`."""
    for finding in _prove(ConfigKey.of(model.config), trial_tokens(seq_len)):
        lines = found.problems if finding.refuses else found.notices
        lines.append(finding.line(model.path))


def trial_tokens(seq_len: int | None) -> int:
    """Return the length of rows for families that run only at the sequence length of the run."""
    return min(seq_len or TOKENS, LONGEST)


def proven_with(config: "PretrainedConfig") -> dict[str, str | None]:
    """Return the versions and sources that the check depends on, to be recorded in run.json."""
    found = {package: installed_version(package) for package in ("torch", "transformers")}
    family = family_sources.family_digest(ConfigKey.of(config).class_name)
    return {**found, "sources": f"{family_sources.shared_digest()} {family}"}


def was_proven(model: Model, settings: Settings) -> bool:
    """Return whether run.json records that this config passed with the installed package versions,
    this attention kernel and document mask.
    """
    try:
        record = (find_run_json(settings.run_dir) if settings.run_dir else None) or {}
    except RecordError:
        return False  # reported when the run directory is checked
    recorded = record.get("settings", {})
    if settings.document_mask != recorded.get("document_mask") or (
        settings.attn_implementation not in ("auto", recorded.get("attn_implementation"))
    ):
        return False
    same = record.get("model_config") == json.loads(json.dumps(model.config.to_diff_dict()))
    return same and record.get(RECORD_KEY) == proven_with(model.config)


@lru_cache(maxsize=64)
def _prove(key: ConfigKey, seq_len: int) -> tuple[Finding, ...]:
    from zerolm.preflight.observed_model import quiet  # imports torch

    def is_computable(config: "PretrainedConfig") -> bool:
        small, tokens = _computable_copy(config, seq_len)
        return not _blindness(_sights(small, tokens))

    with quiet():
        try:
            return tuple(_findings(*computable_copy(key, seq_len)))
        except _NotComputableError as error:
            keys = remedies(key.config, is_computable)
            return (Finding(f"the model cannot be computed ({error})", keys=keys),)
        except Exception as error:  # any class: transformers does not validate all values
            why = f"a small copy of it cannot be computed ({_cause(error)})"
            return (Finding(f"the model is not proven to be causal: {why}", refuses=False),)


@lru_cache(maxsize=64)
def computable_copy(key: ConfigKey, seq_len: int) -> tuple["PretrainedConfig", int]:
    """Return the config of the small copy that is proven, and the number of tokens in its rows."""
    return _computable_copy(key.config, seq_len)


def _computable_copy(config: "PretrainedConfig", seq_len: int) -> tuple["PretrainedConfig", int]:
    """Try small copies of a model; return the config of the first that runs, and its sequence
    length.

    Raises:
        _NotComputableError: the full-size model cannot run either.
        Exception: the first error raised by a small copy.
    """
    from zerolm.preflight import observed_model

    error: Exception | None = None
    shapes = parameter_shapes(config)
    short = min(TOKENS, max_positions(config) or TOKENS)
    for copy in small_copies(config, shapes):
        for tokens in dict.fromkeys((short, seq_len)):
            try:
                _compute(copy.config, tokens)
            except Exception as caught:
                error = error or caught
                if NEEDS_DEVICE.search(str(caught)):
                    continue
                last = copy.same_widths and tokens == seq_len
                if last or _is_computable(observed_model.without_noise(copy.config), tokens):
                    raise _NotComputableError(_cause(caught)) from caught
                continue
            if not copy.same_widths and (wrong := _shape_error(config, tokens)):
                raise _NotComputableError(_cause(wrong)) from wrong
            return copy.config, tokens
    known = error if error is None or not NEEDS_DEVICE.search(str(error)) else None
    if wrong := _shape_error(config, seq_len, known):
        raise _NotComputableError(_cause(wrong)) from wrong
    assert error is not None, "there is a small copy"
    raise error


def _cause(error: Exception) -> str:
    """Return the error that the transformers code raised, as text."""
    inner = error.__cause__
    return reason(inner if isinstance(error, ConfigError) and inner is not None else error)


def _compute(config: "PretrainedConfig", tokens: int) -> None:
    """Run a forward and backward pass with each kernel; errors from the model's code propagate."""
    from zerolm.preflight.observed_model import build, sensitivities

    for kernel in kernels(config):
        sensitivities(build(config, kernel), tokens, seed=0)


def _is_computable(config: "PretrainedConfig", tokens: int) -> bool:
    try:
        _compute(config, tokens)
    except Exception:
        return False
    return True


def kernels(config: "PretrainedConfig") -> list[str]:
    """Return the attention kernels that every device supports, preferred first."""
    return [*["sdpa"] * bool(causal_lm_class(config)._supports_sdpa), "eager"]


def _shape_error(
    config: "PretrainedConfig", tokens: int, known: Exception | None = None
) -> Exception | None:
    """Run full-size layers on fake tensors; return the error that they raise, or None.

    Args:
        known: the error that a small copy raised.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    small = shallow_config(config, parameter_shapes(config))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), no_init_weights():
            model = AutoModelForCausalLM.from_config(
                small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            )
            model.train()(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    except Exception as error:  # other errors are due to missing values: fake tensors have none
        return error if str(error) == str(known) or SHAPES.search(str(error)) else None
    return None


def _findings(config: "PretrainedConfig", tokens: int) -> Iterable[Finding]:
    """Run a small model, and yield the problems found in it."""
    from zerolm.preflight.observed_model import beginning, build

    sights = _sights(config, tokens)
    if texts := _blindness(sights):
        keys = remedies(config, lambda changed: not _blindness(_sights(changed, tokens)))
        yield Finding("; ".join(texts), keys=keys)
        return
    if gaps := _gaps(sights):
        keys = remedies(config, lambda changed: not _gaps(_sights(changed, tokens)))
        text = f"{gaps} of {tokens - 1} positions do not see the previous token"
        yield Finding(text, refuses=False, keys=keys)
    kernel = kernels(config)[0]
    start = beginning(build(config, kernel), tokens)
    if start.broken:
        keys = remedies(
            config, lambda changed: not beginning(build(changed, kernel), tokens).broken
        )
        yield Finding(f"with the initial weights {start.broken}", keys=keys)
        return
    yield from _loss_findings(config, tokens, start.loss)
    gradients = _gradients(config, tokens)
    if dead := gradients.dead | gradients.unused:

        def revives(changed: "PretrainedConfig") -> bool:
            other = _gradients(changed, tokens)
            revived = (dead & other.names) - other.dead - other.unused
            return len(revived) >= len(dead) / 2

        def is_by_config(name: str) -> bool:
            # Some families have modules that text inputs do not use, or key biases, which softmax
            # cancels.
            return is_routed_expert(name) or not (name.endswith("bias") or name in gradients.unused)

        used = gradients.names - gradients.unused
        yield Finding(
            f"no gradient reaches {_listed(dead, gradients.names)}, so training does not change "
            f"them",
            refuses=any(map(is_routed_expert, dead)) or len(gradients.dead) > len(used) / 2,
            keys=remedies(config, revives) if any(map(is_by_config, dead)) else (),
        )
    if silent := start.silent - dead:

        def speaks(changed: "PretrainedConfig") -> bool:
            return not silent & beginning(build(changed, kernel), tokens).silent

        yield Finding(
            f"with the initial weights no gradient reaches {_listed(silent, gradients.names)} in "
            f"the first steps",
            refuses=len(silent) > len(gradients.names - dead) / 2,
            keys=remedies(config, speaks),
        )


def _sights(config: "PretrainedConfig", tokens: int) -> "Sights":
    """Measure on which tokens the logits of a model with large weights depend.

    Returns the results of two batches for each attention kernel.
    """
    from zerolm.preflight.observed_model import build_with_large_weights, sight

    models = {kernel: build_with_large_weights(config, kernel) for kernel in kernels(config)}
    return {
        kernel: [sight(model, tokens, seed) for seed in (0, 1)] for kernel, model in models.items()
    }


def _blindness(sights: "Sights") -> list[str]:
    """Return a description of each violation of causality, with the attention kernels that show
    it.
    """
    texts: dict[str, list[str]] = {}
    for kernel, seen in sights.items():
        text, *others = map(_fault, seen)
        # A violation in only one batch may be due to a tie between experts.
        if text and all(others):
            texts.setdefault(text, []).append(kernel)
    return [f"with {' and '.join(used)} {text}" for text, used in texts.items()]


def _fault(seen: "Sight") -> str:
    if math.isnan(seen.future):
        return "logits are not finite"
    if seen.future > SEEN:
        return "positions see later tokens, also the one that they must predict"
    if max(seen.own) <= SEEN:
        return "no position sees its own token"
    if seen.previous and max(seen.previous) <= SEEN:
        return "no position sees the previous token"
    return ""


def _gaps(sights: "Sights") -> int:
    """Return how many of the tested positions do not depend on the token before them."""
    return max(
        sum(max(changes) <= SEEN for changes in zip(*(one.previous for one in seen), strict=True))
        for seen in sights.values()
    )


def _loss_findings(config: "PretrainedConfig", tokens: int, loss: float) -> Iterable[Finding]:
    from zerolm.preflight.observed_model import beginning, build

    kernel = kernels(config)[0]
    equal = math.log(max(2, config.get_text_config().vocab_size))
    if loss > HIGH_LOSS * equal:
        keys = remedies(
            config,
            lambda changed: beginning(build(changed, kernel), tokens).loss <= HIGH_LOSS * equal,
        )
        text = (
            f"the first loss of a small copy is {loss:.3g}, but uniform predictions give "
            f"{equal:.3g}: the initial weights or a multiplier are too large"
        )
        yield Finding(text, refuses=False, keys=keys)


@dataclass(frozen=True)
class _Gradients:
    """Names of a model's trained parameters, and of those that never receive a gradient.

    Attributes:
        dead: parameters that the loss uses but that receive no gradient.
        unused: parameters that the loss does not use.
    """

    names: frozenset[str]
    dead: frozenset[str]
    unused: frozenset[str]


def _gradients(config: "PretrainedConfig", tokens: int) -> _Gradients:
    from zerolm.preflight.observed_model import build_with_large_weights, sensitivities

    model = build_with_large_weights(config, kernels(config)[0])
    longer = min(LONGER, max_positions(config) or LONGER)
    largest: dict[str, float | None] = sensitivities(model, tokens, seed=0)
    # Another batch may choose other experts, and longer rows use the parts for long distances.
    for seed, length in ((1, tokens), (2, longer)):
        if all(value is not None and value >= NO_GRADIENT for value in largest.values()):
            break
        try:
            found = sensitivities(model, length, seed)
        except Exception:  # a family that supports only one length
            continue
        for name, value in found.items():
            largest[name] = max(filter(None, (value, largest[name])), default=value)
    unused = frozenset(name for name, value in largest.items() if value is None)
    dead = frozenset(name for name, value in largest.items() if not (value or 0) >= NO_GRADIENT)
    return _Gradients(frozenset(largest), dead - unused, unused)


def _listed(chosen: frozenset[str], names: frozenset[str]) -> str:
    """Join names into a short list, with * for the layer number where a name occurs in every
    layer.
    """
    total = Counter(NUMBER.sub(".*", name) for name in names)
    count = Counter(NUMBER.sub(".*", name) for name in chosen)
    short = [
        pattern if total[pattern] == count[pattern] else name
        for name in sorted(chosen)
        for pattern in [NUMBER.sub(".*", name)]
    ]
    first, more = list(dict.fromkeys(short))[:4], len(dict.fromkeys(short)) - 4
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
