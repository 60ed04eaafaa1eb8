"""An exponential moving average of the master weights, with a half-life in tokens.

Each rank stores the average of its own part of the float32 master weights as an additional
optimizer state, so DeepSpeed partitions, offloads, saves and loads the average like the moments,
and resharding handles it too. Must not depend on the training loop.
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

STATE = "ema"  # key of the average in the optimizer state
PREFIX = "ema_"  # prefix of metrics measured with the average: eval/loss becomes eval/ema_loss


def is_metric_of_average(key: str) -> bool:
    """Return whether a metric was measured with the average."""
    return key.rpartition("/")[2].startswith(PREFIX)


class Ema:
    """The moving average of one rank's master weights. Every rank must make the same calls.

    After an applied step of n tokens, the new weights enter the average with coefficient 1 - 2^(-n
    / half-life), and all earlier coefficients are multiplied by 2^(-n / half-life). As in Adam's
    bias correction, the average is divided by the sum of the coefficients, so it does not depend
    on an initial value. That sum, at most 1, is the argument `counted` of the methods and is saved
    with the run's progress.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3, with master weights in memory.
    """

    def __init__(self, engine: Any, half_life_tokens: int):
        self._engine, self._half_life = engine, half_life_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the optimizer states hold an average for all of this rank's master weights."""
        masters = master_partitions(self._engine)
        return all(STATE in self._states.get(master, {}) for master in masters)

    @torch.no_grad()
    def update(self, counted: float, tokens: int) -> float:
        """Add the weights after an applied step to the average; return the new `counted`.

        Args:
            tokens: number of tokens in the step's global batch.
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
        """Use the average as the model's weights inside this context. Every rank must call this.

        The master weights and their average are swapped in place, and the model's weights are
        recomputed from them as after a step; on exit everything is restored bit for bit. After an
        error the weights are restored only in single-rank runs, since other ranks may be waiting
        in another collective.
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
    """Drop an average that was loaded from a checkpoint but that this run does not use."""
    drop_state(engine, STATE)
