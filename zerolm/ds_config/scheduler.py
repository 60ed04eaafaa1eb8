"""Computes the learning rates of DeepSpeed's schedulers with DeepSpeed's own code."""

from collections.abc import Mapping, Sequence
from typing import Any

from zerolm.ds_config.implied import DEEPSPEED_SCHEDULES

FIRST_STEPS, SAMPLES = 10, 200  # steps to sample: the first ones, and evenly spaced ones


def rates(block: Mapping[str, Any], learning_rate: float, steps: Sequence[int]) -> list[float]:
    """Return the learning rate that the engine uses at each of the ascending steps, counted from 1.

    The scheduler advances after a step, so the first step uses the scheduler's initial rate.

    Args:
        block: a resolved `scheduler` block.
    """
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.utils import logger

    weights = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weights], lr=learning_rate)
    level = logger.level
    logger.setLevel("ERROR")  # DeepSpeed warns that the rate is read before the first step
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
    """Summarize a scheduler: its highest rate, its last rate, and the steps at rate 0.

    Args:
        learning_rate: the peak for `DEEPSPEED_SCHEDULES`; for other types, the peak is searched.
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
