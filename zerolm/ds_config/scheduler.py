"""Computes the learning rates of DeepSpeed's schedulers with DeepSpeed's own code."""

from collections.abc import Mapping, Sequence
from typing import Any

from zerolm.ds_config.implied import DEEPSPEED_SCHEDULES

# Numbers of steps to sample: at the start of the run, and evenly spaced over the run.
FIRST_STEPS, SAMPLES = 10, 200


def rates(block: Mapping[str, Any], learning_rate: float, steps: Sequence[int]) -> list[float]:
    """Return the engine's learning rate at each of the given steps, ascending and counted from 1.

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
    logger.setLevel("ERROR")  # DeepSpeed warns when the rate is read before the first step
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
    """Describe a schedule in one line: its peak rate, its last rate, and early steps with rate 0.

    Args:
        learning_rate: the peak for types in `DEEPSPEED_SCHEDULES`; for other types, the highest
            sampled rate is the peak.
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
