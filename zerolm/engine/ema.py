"""An exponential moving average of the master weights, with a half-life in tokens.

Each rank keeps the average of its own part of the float32 master weights as one more state of the
optimizer, beside the moments. So it is partitioned and offloaded as these are, DeepSpeed saves and
loads it with them, and it is resharded with them. Must not depend on the training loop.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerolm.engine.states import (
    CHUNK_VALUES,
    drop_state,
    master_partitions,
    optimizer_states,
    update_weights,
)

STATE = "ema"  # key of the average in the optimizer's state
PREFIX = "ema_"  # metrics measured with the average: eval/loss becomes eval/ema_loss


def is_metric_of_average(key: str) -> bool:
    """Return whether a metric was measured with the average."""
    return key.rpartition("/")[2].startswith(PREFIX)


class Ema:
    """The moving average of one rank's master weights. Every rank makes the same calls.

    The weights after an applied step of n tokens count with 1 - 2^(-n / half-life), and all earlier
    ones with 2^(-n / half-life) times what they counted before; the average is divided by the sum
    of what they count, as Adam's moments are, so that no initial value is part of it. That sum, of
    at most 1, is the argument `counted` of the methods, and is saved with the run's progress.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3, with master weights in memory.
    """

    def __init__(self, engine: Any, half_life_tokens: int):
        self._engine, self._half_life = engine, half_life_tokens

    @property
    def is_complete(self) -> bool:
        """Whether there is an average of all of this rank's master weights."""
        masters = master_partitions(self._engine)
        return all(STATE in self._states.get(master, {}) for master in masters)

    @torch.no_grad()
    def update(self, counted: float, tokens: int) -> float:
        """Include the weights after an applied step; return the new `counted`.

        Args:
            tokens: tokens of the step's global batch.
        """
        weight = -math.expm1(-math.log(2.0) * tokens / self._half_life)
        total = counted + weight * (1.0 - counted)
        for master in master_partitions(self._engine):
            if counted:
                self._states[master][STATE].lerp_(master.detach(), weight / total)
            else:
                self._states[master][STATE] = master.detach().clone()
        return total

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Make the average the weights of the model inside this context. Every rank must call this.

        The master weights are exchanged with their average in place, and the model's weights are
        computed from them as after a step, so afterwards all are as before in every bit. After an
        error other ranks may wait elsewhere, so only a single rank restores its weights then.
        """
        self._exchange()
        try:
            yield
        except BaseException:
            if self._engine.world_size == 1:
                self._exchange()
            raise
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for master in master_partitions(self._engine):
            both = master.detach(), self._states[master][STATE]
            parts = (each.view(-1).split(CHUNK_VALUES) for each in both)
            for values, averages in zip(*parts, strict=True):
                kept = values.clone()
                values.copy_(averages)
                averages.copy_(kept)
        update_weights(self._engine)

    @property
    def _states(self) -> dict[torch.Tensor, dict[str, Any]]:
        return optimizer_states(self._engine)


def drop(engine: Any) -> None:
    """Drop an average that was loaded, and is not this run's."""
    drop_state(engine, STATE)
