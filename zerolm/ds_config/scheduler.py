"""Computes what DeepSpeed's schedulers set in each step of a run, with DeepSpeed's own code."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from zerolm.ds_config.implied import DEEPSPEED_SCHEDULES
from zerolm.ds_config.optimizers import cycles_betas
from zerolm.ds_config.profile import Profile


class Course(NamedTuple):
    """What a scheduler sets in each step of a run, in order.

    Attributes:
        betas: pairs; the optimizer's own if the scheduler leaves them alone.
    """

    rates: list[float]
    betas: list[tuple[float, float]]


def course(block: Mapping[str, Any], learning_rate: float, total_steps: int) -> Course:
    """Return the learning rates and betas of a run with AdamW.

    Args:
        block: a resolved `scheduler` block.
    """
    return _course(json.dumps(block), learning_rate, total_steps)


@functools.lru_cache(maxsize=4)
def _course(block: str, learning_rate: float, total_steps: int) -> Course:
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.utils import logger

    weights = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weights], lr=learning_rate)
    group, written = optimizer.param_groups[0], json.loads(block)
    level = logger.level
    logger.setLevel("ERROR")  # DeepSpeed warns when the rate is read before the first step
    try:
        scheduler = getattr(lr_schedules, written["type"])(optimizer, **written.get("params", {}))
    finally:
        logger.setLevel(level)
    found = Course([], [])
    for step in range(total_steps):
        if step:
            scheduler.step()  # it advances after a step, so the first one has its initial rate
        found.rates.append(float(group["lr"]))
        found.betas.append(group["betas"])
    return found


def course_problems(profile: Profile, learning_rate: float, total_steps: int) -> list[str]:
    """Refuse a scheduler that sets rates or betas with which no optimizer can train.

    Args:
        profile: resolved, with a scheduler.
    """
    found = course(profile.block("scheduler"), learning_rate, total_steps)
    where = f"{profile.name}: scheduler.params: {profile.scheduler}"
    rates = enumerate(found.rates, 1)
    wrong = next((each for each in rates if not 0 <= each[1] < math.inf), None)
    problems = []
    if wrong:
        problems.append(
            f"{where} sets the learning rate {wrong[1]:g} in step {wrong[0]}, which must be at "
            f"least 0. Correct its parameters."
        )
    betas = enumerate((pair[0] for pair in found.betas), 1) if cycles_betas(profile) else ()
    if wrong := next((each for each in betas if not 0 <= each[1] < 1), None):
        problems.append(
            f"{where} sets beta1 to {wrong[1]:g} in step {wrong[0]}, which must be below 1. "
            f"Correct cycle_max_mom or decay_mom_rate, or set cycle_momentum to false."
        )
    if max(found.rates) == 0:
        problems.append(f"{where} sets the learning rate 0 in every step. Correct its parameters.")
    return problems


def description(profile: Profile, learning_rate: float, total_steps: int) -> str:
    """Describe a schedule in one line, from all steps of the run.

    Args:
        profile: resolved, with a scheduler.
        learning_rate: the peak that the settings have.
    """
    rates, betas = course(profile.block("scheduler"), learning_rate, total_steps)
    peak = f"{max(rates):g}"
    text = f"{profile.scheduler} of the ds config, peak {peak}, last {rates[-1]:g}"
    if profile.scheduler in DEEPSPEED_SCHEDULES and peak != f"{learning_rate:g}":
        text += f"; it never reaches {learning_rate:g}"
    if cycles_betas(profile):
        first = [beta for beta, _ in betas]
        text += f"; cycle_momentum sets beta1 from {min(first):g} to {max(first):g}"
        text += f" and beta2 to {betas[0][1]:g}"
    idle = [step for step, rate in enumerate(rates, 1) if rate == 0]
    if idle:
        text += f"; 0 in step{'s' * (len(idle) > 1)} {_ranges(idle)}, which change no weight"
    return text


def _ranges(steps: Sequence[int]) -> str:
    """Write ascending numbers as ranges, such as `1 to 3, 7`."""
    runs = (
        [step for _, step in run]
        for _, run in groupby(enumerate(steps), lambda each: each[1] - each[0])
    )
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
