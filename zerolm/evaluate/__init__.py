"""Evaluations of a model, during a run or after export: one module each, and the list of them.

Evaluations run in the order of `EVALUATIONS`. Their modules import little at the top, so `--help`
is instant. Must not depend on checkpoints or the training loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError
from zerolm.evaluate.core import Core
from zerolm.evaluate.evaluation import Evaluation
from zerolm.evaluate.hellaswag import HellaSwag
from zerolm.evaluate.lm_eval import LmEval
from zerolm.evaluate.needle import Needle
from zerolm.evaluate.samples import Samples
from zerolm.evaluate.validation import Validation

if TYPE_CHECKING:
    from zerolm.plan.plan import Plan
    from zerolm.shards.reader import Source

DOWNSTREAM = "downstream_interval"  # used by most evaluations

EVALUATIONS: tuple[type[Evaluation], ...] = (
    Validation,
    Needle,
    HellaSwag,
    Core,
    LmEval,
    Samples,
)
OUTCOMES = tuple(kind.name for kind in EVALUATIONS if kind.OUTCOMES)  # for `RunFiles.outcomes`


def _downstream(settings: Any) -> list[type[Evaluation]]:
    return [kind for kind in EVALUATIONS if kind.interval == DOWNSTREAM and kind.wanted(settings)]


def downstream_interval(settings: Any, default: int) -> int | None:
    """Return the resolved `downstream_interval`; None if it is neither set nor used."""
    if not _downstream(settings):
        return settings.downstream_interval
    return settings.downstream_interval or settings.eval_interval or default


def problems(settings: Any) -> list[str]:
    """Return problems with the settings themselves, one line each."""
    needs: dict[str, tuple[str, ...]] = {
        DOWNSTREAM: tuple(kind.setting for kind in EVALUATIONS if kind.interval == DOWNSTREAM)
    }
    for kind in EVALUATIONS:
        needs |= dict.fromkeys([each.name for each in fields(kind.Flags)], (kind.setting,))
        needs[kind.setting] = tuple(kind.requires)
    found = []
    for name, required in needs.items():
        default = settings.__dataclass_fields__[name].default
        changed = name in settings.explicit and getattr(settings, name) != default
        if changed and required and not any(getattr(settings, each) for each in required):
            flags = " or ".join(f"--{each}" for each in required)
            found.append(
                f"{settings.where(name)}: {getattr(settings, name)} needs {flags}. Add it, or "
                f"remove this setting."
            )
    return found + [line for kind in EVALUATIONS for line in kind.problems(settings)]


def input_problems(
    settings: Any,
    sources: "Sequence[Source]",
    config: Any,
    environment: Mapping[str, str],
) -> list[str]:
    """Return problems with the files, tasks and tokenizer that the settings name, one line each.

    Only a new run is refused because of such a problem. A resumed run continues without the
    affected evaluation, since a file may have been moved or a hub may be down. Inputs that only
    rank 0 uses are read only there.

    Args:
        sources: training sources; empty if none could be opened.
        config: the model config; None if it could not be read.
        environment: the launcher's environment variables.
    """
    wanted = [kind for kind in EVALUATIONS if kind.on_texts and kind.wanted(settings)]
    if not wanted or not sources:
        return []
    from zerolm.evaluate.text_coder import TextCoder

    try:
        coder = TextCoder.of_shards(sources[0])
    except ConfigError as error:
        where = settings.where(wanted[0].setting)
        return [f"{where}: needs a tokenizer: {problem}" for problem in error.problems]
    if environment.get("RANK", "0") != "0":
        return []
    found = []
    max_length = None if config is None else max_text_tokens(settings, config, coder.tokenizer)
    for kind in wanted:
        try:
            kind.check(settings, coder, max_length)
        except ConfigError as error:
            found += [f"{settings.where(kind.setting)}: {problem}" for problem in error.problems]
    return found


def max_text_tokens(settings: Any, config: Any, tokenizer: Any) -> int:
    """Return the maximum number of tokens per text in a forward pass during a run.

    The maximum does not exceed the length of a training sequence: the model has not learned
    positions beyond that length, and training may not leave enough memory for them. `settings` are
    resolved as far as possible.
    """
    from zerolm.evaluate.text_coder import max_length

    positions = max_length(config, tokenizer)
    return positions if settings.seq_len is None else min(positions, settings.seq_len)


def summary(plan: "Plan") -> dict[str, str]:
    """Return the lines that evaluations add to a run's plan."""
    lines = {name: line for kind in EVALUATIONS for name, line in kind.summary(plan).items()}
    if names := [kind.label(plan.settings) for kind in _downstream(plan.settings)]:
        every = plan.settings.downstream_interval
        lines["downstream"] = f"{', '.join(names)} every {every} steps"
    return lines
