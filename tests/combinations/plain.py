"""The losses of a draw without features, by the loop in plain PyTorch."""

import math
from functools import partial
from pathlib import Path

from tests.combinations.draws import Draw
from tests.combinations.runs import CLIPPING, STEPS, WARMUP_STEPS, models
from tests.end_to_end import plain_pytorch
from tests.end_to_end.recipe import STEP_TOKENS


def losses(draw: Draw, base: Path) -> list[float]:
    """Train by the loop in plain PyTorch, and return the loss of each step."""
    curve = plain_pytorch.train(
        models()[draw["model"]], base / "data" / "web", steps=STEPS, clipping=CLIPPING,
        warmup_tokens=WARMUP_STEPS * STEP_TOKENS, bf16=draw["precision"] == "bf16",
        rate_of=RATES[draw["schedule"]],
    )  # fmt: skip
    return [step.loss for step in curve]


def after_warmup(decay: "plain_pytorch.Rate", *arguments: float) -> float:
    tokens, _, warmup, peak, _ = arguments
    return peak * tokens / warmup if tokens < warmup else decay(*arguments)


def linear(tokens: float, total: float, warmup: float, peak: float, minimum: float) -> float:
    return minimum + (peak - minimum) * (total - tokens) / (total - warmup)


def stable_then_linear(
    tokens: float, total: float, warmup: float, peak: float, minimum: float
) -> float:
    start = total - 2 * STEP_TOKENS
    return peak if tokens < start else linear(tokens, total, start, peak, minimum)


def constant(tokens: float, total: float, warmup: float, peak: float, minimum: float) -> float:
    return peak


def warmup_lr(tokens: float, total: float, warmup: float, peak: float, minimum: float) -> float:
    """DeepSpeed's WarmupLR: logarithmic from 0, and at 0 for the first two steps."""
    step = max(tokens / STEP_TOKENS - 1, 1)
    return peak * min(1.0, math.log(step) / math.log(WARMUP_STEPS))


RATES = {
    "cosine": plain_pytorch.cosine,
    "linear": partial(after_warmup, linear),
    "wsd": partial(after_warmup, stable_then_linear),
    "constant": partial(after_warmup, constant),
    "warmup_lr": warmup_lr,
}
