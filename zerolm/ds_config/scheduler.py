"""The learning rates of DeepSpeed's schedulers, from DeepSpeed itself. Imports it in functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from zerolm.ds_config.implied import DEEPSPEED_SCHEDULES

FIRST_STEPS, SAMPLES = 10, 200  # steps that are looked at: the first, and equally far apart


def rates(block: Mapping[str, Any], learning_rate: float, steps: Sequence[int]) -> list[float]:
    """Return the learning rate that the engine uses in each of some ascending steps, from 1.

    The scheduler is advanced after a step, so the first step has the rate that it begins with.

    Args:
        block: a resolved `scheduler` block.
    """
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.utils import logger

    weights = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weights], lr=learning_rate)
    level = logger.level
    logger.setLevel("ERROR")  # it warns that the rate is read before the first step
    try:
        scheduler = getattr(lr_schedules, block["type"])(optimizer, **block.get("params", {}))
    finally:
        logger.setLevel(level)
    found = []
    for step in steps:
        if step > 1:
            scheduler.step(step - 2)
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def description(block: Mapping[str, Any], learning_rate: float, total_steps: int) -> str:
    """Return the course of a scheduler: its highest rate, its last one, and its steps at rate 0.

    Args:
        learning_rate: the peak of `DEEPSPEED_SCHEDULES`; of the others the peak is looked for.
    """
    shares = [round(total_steps * number / SAMPLES) for number in range(SAMPLES + 1)]
    steps = sorted({*range(1, min(FIRST_STEPS, total_steps) + 1), *shares} - {0})
    of_step = dict(zip(steps, rates(block, learning_rate, steps), strict=True))
    kind, idle = block["type"], [str(step) for step in steps[:FIRST_STEPS] if of_step[step] == 0]
    peak = learning_rate if kind in DEEPSPEED_SCHEDULES else max(of_step.values())
    text = f"{kind} of the ds config, peak {peak:g}, last {of_step[total_steps]:g}"
    if idle:
        text += f"; 0 in step{'s' * (len(idle) > 1)} {' and '.join(idle)}, which change no weight"
    return text
