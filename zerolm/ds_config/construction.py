"""A table of the checks that DeepSpeed runs only while it builds an engine, with their sources.

If these checks failed there, a run would be refused only after minutes of start-up. `schema` and
`resolve` find what DeepSpeed's types and its config object refuse; `rules` finds what zerolm
refuses for other reasons. Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from zerolm.common.values import shown
from zerolm.ds_config.profile import AUTO, Profile, block
from zerolm.engine.config_keys import is_number

MISSING = object()
# Scheduler parameters whose values are not numbers.
NO_NUMBERS = ("warmup_type", "cycle_momentum", "lr_range_test_staircase")


class Assertion(NamedTuple):
    """A check for a value that DeepSpeed refuses.

    Attributes:
        key: dotted key of the value.
        refused: function that returns whether a value is refused, given the profile and the value
            (`MISSING` if the key is missing).
        source: file in deepspeed/runtime that contains the check, and its message.
    """

    key: str
    refused: Callable[[Profile, Any], bool]
    rule: str
    fix: str
    source: str


def _scatters(profile: Profile) -> bool:
    default = not (profile.uses_muon and profile.zero_stage == 3)
    return profile.zero_stage in (2, 3) and profile.zero.get("reduce_scatter", default) is not False


def _is(kind: str, accepts: Callable[[Any], bool]) -> Callable[[Profile, Any], bool]:
    """Return a check that refuses a scheduler parameter's value if it is given but not accepted."""
    return lambda profile, value: (
        profile.scheduler == kind and value not in (MISSING, AUTO) and not accepts(value)
    )


def _lacks(kind: str) -> Callable[[Profile, Any], bool]:
    return lambda profile, value: profile.scheduler == kind and value is MISSING


def _is_class(name: Any) -> bool:
    package, dot, kind = str(name).rpartition(".")
    try:
        return bool(dot) and hasattr(import_module(package), kind)
    except (ImportError, ValueError):
        return False


def _are_classes(profile: Profile, names: Any) -> bool:
    """Return whether `names` is a list of strings and, with autocast, of importable classes."""
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return False
    return not profile.block("torch_autocast").get("enabled") or all(map(_is_class, names))


ASSERTIONS = (
    Assertion(
        "prescale_gradients", lambda profile, value: value is True and _scatters(profile),
        "needs zero_optimization.reduce_scatter false at stages 2 and 3", "Remove the key",
        "zero/stage_1_and_2.py, zero/stage3.py: pre-scale gradients is not yet supported",
    ),
    Assertion(
        "gradient_predivide_factor",
        lambda profile, value: is_number(value) and value != 1 and _scatters(profile),
        "needs zero_optimization.reduce_scatter false at stages 2 and 3", "Remove the key",
        "zero/stage_1_and_2.py, zero/stage3.py: gradient_predivide_factor != 1.0 is not yet",
    ),
    Assertion(
        "zero_optimization.legacy_stage1", lambda profile, value: value is True,
        "selects the old stage 1, which DeepSpeed has removed", "Remove the key",
        "engine.py: The deprecated version of ZeRO Stage 1 is not supported",
    ),
    Assertion(
        "torch_autocast.lower_precision_safe_modules",
        lambda profile, value: value is not MISSING and not _are_classes(profile, value),
        "must be a list of classes that can be imported", 'Write for example ["torch.nn.Linear"]',
        "torch_autocast.py: Failed to import lower precision safe module",
    ),
    Assertion(
        "scheduler.params.cycle_min_lr", _lacks("OneCycle"), "OneCycle needs it", "Add a rate",
        "lr_schedules.py: OneCycle.__init__",
    ),
    Assertion(
        "scheduler.params.cycle_max_lr", _lacks("OneCycle"), "OneCycle needs it", "Add a rate",
        "lr_schedules.py: OneCycle.__init__",
    ),
    Assertion(
        "scheduler.params.cycle_first_step_size",
        _is("OneCycle", lambda value: is_number(value) and value > 0),
        "must be a number above 0", "Correct it",
        "lr_schedules.py: cycle_first_step_size must be positive",
    ),
    Assertion(
        "scheduler.params.cycle_second_step_size",
        _is("OneCycle", lambda value: value is None or (is_number(value) and value >= 0)),
        "must be a number, at least 0", "Correct it",
        "lr_schedules.py: cycle_second_step_size must be non-negative",
    ),
    Assertion(
        "scheduler.params.lr_range_test_step_size",
        _is("LRRangeTest", lambda value: is_number(value) and isinstance(value, int) and value > 0),
        "must be a whole number above 0", "Correct it",
        "lr_schedules.py: lr_range_test_step_size must be a positive integer",
    ),
)  # fmt: skip


def construction_problems(profile: Profile) -> list[str]:
    """Return a problem for each value that DeepSpeed would refuse when it builds the engine."""
    problems = []
    for key, refused, rule, fix, _ in ASSERTIONS:
        *path, name = key.split(".")
        value = block(profile.json, *path).get(name, MISSING)
        if refused(profile, value):
            subject = "missing, but" if value is MISSING else shown(value)
            problems.append(f"{key}: {subject} {rule}. {fix}.")
    judged = {problem.partition(":")[0] for problem in problems}
    # All other parameters must be numbers, since DeepSpeed computes with them. It would treat a
    # list as one value per parameter group.
    problems += [
        f"{key}: {shown(value)} must be a number. Correct it."
        for name, value in profile.scheduler_params.items()
        if (key := f"scheduler.params.{name}") not in judged
        and name not in (*NO_NUMBERS, "warmup_num_steps", "cycle_second_step_size")
        and value != AUTO
        and not is_number(value)
    ]
    return problems
