"""Merges checkpoints: a weighted mean of their float32 master weights, one tensor at a time.

Averaging checkpoints trained at a constant learning rate approximates a learning-rate decay (arXiv
2507.17634): with coefficients c_0 ... c_k, which sum to 1, the update between checkpoints i-1 and
i has weight w_i = c_i + ... + c_k. `wsm_coefficients` inverts this for a given decay shape. Must
not depend on runs or engines.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from zerolm.checkpoint.directory import Checkpoint
from zerolm.common.errors import CheckpointError
from zerolm.common.values import shown
from zerolm.ds_files.zero_files import Weights
from zerolm.export.export import load_exported

CHUNK_VALUES = 1 << 22  # number of values added at a time, because torch converts them to float64
INTEGRATION_POINTS = 1000
CHECKED_TENSORS, CHECKED_VALUES = 4, 4096


def mean_coefficients(tokens: Sequence[int]) -> list[float]:
    """Return equal coefficients."""
    return [1.0 / len(tokens)] * len(tokens)


def ema_coefficients(tokens: Sequence[int], decay: float) -> list[float]:
    """Return the coefficients of an exponential moving average that starts at the oldest
    checkpoint.

    Each newer checkpoint multiplies the average so far by `decay`; only the length of `tokens`
    matters.
    """
    newest = len(tokens) - 1
    return [
        (1.0 - decay if number else 1.0) * decay ** (newest - number)
        for number in range(len(tokens))
    ]


def wsm_coefficients(tokens: Sequence[int], remaining: Callable[[float], float]) -> list[float]:
    """Return the coefficients that imply a learning-rate decay from the oldest to the newest
    checkpoint.

    The update between two checkpoints is weighted by the mean of the decay over the tokens between
    them, so the distances between checkpoints may differ.

    Args:
        tokens: number of tokens trained at each checkpoint, strictly ascending.
        remaining: a function from `zerolm.optim.schedule.DECAY_SHAPES`.

    Source: Tian et al. 2025 (arXiv 2507.17634), theorem 1.
    """
    first, length = tokens[0], tokens[-1] - tokens[0]
    implied = [1.0]  # w_0
    for start, end in pairwise((each - first) / length for each in tokens):
        points = ((number + 0.5) / INTEGRATION_POINTS for number in range(INTEGRATION_POINTS))
        total = sum(remaining(start + (end - start) * point) for point in points)
        implied.append(total / INTEGRATION_POINTS)
    return [before - after for before, after in pairwise([*implied, 0.0])]


def model_differences(checkpoints: Sequence[Checkpoint], irrelevant: frozenset[str]) -> list[str]:
    """Return a line for each config key whose value differs from the first checkpoint's, except for
    `irrelevant` keys.
    """
    first = checkpoints[0]
    ours = first.manifest["model_config"]
    problems = []
    for other in checkpoints[1:]:
        theirs = other.manifest["model_config"]
        problems += [
            f"{other.directory}: model_config.{key}: {shown(theirs.get(key))}, but "
            f"{shown(ours.get(key))} in {first.directory}. Merge checkpoints of the same model."
            for key in sorted({*ours, *theirs} - irrelevant)
            if ours.get(key) != theirs.get(key)
        ]
    return problems


class MergedWeights:
    """Weighted means of several checkpoints' weights, computed one tensor at a time.

    The checkpoints must be verified and sorted, oldest first. Sums are in float64. Integer buffers
    come from the newest checkpoint.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], coefficients: Sequence[float]):
        self._terms = [
            (Weights(checkpoint.directory, checkpoint.manifest), coefficient)
            for checkpoint, coefficient in zip(checkpoints, coefficients, strict=True)
        ]

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the weighted mean of a parameter or buffer, in its own dtype."""
        total: torch.Tensor | None = None
        for weights, coefficient in self._terms:
            tensor = weights[name]
            if not tensor.is_floating_point():
                return self._terms[-1][0][name]
            if total is None:
                total = torch.zeros(tensor.numel(), dtype=torch.float64)
            values = tensor.reshape(-1)
            for part, added in zip(
                total.split(CHUNK_VALUES), values.split(CHUNK_VALUES), strict=True
            ):
                part.add_(added.double(), alpha=coefficient)
        assert total is not None
        shape, dtype = tensor.shape, tensor.dtype
        del tensor, values, added  # free them, because the result is as large and is allocated next
        return total.to(dtype).view(shape)

    def release(self) -> None:
        """Close the shards so that the kernel can evict their mapped pages."""
        for weights, _ in self._terms:
            weights.release()

    @torch.no_grad()
    def check(self, directory: Path) -> str:
        """Load the written model, and compare some of its values with means over the checkpoints.

        Raises:
            CheckpointError: weights are missing, unexpected, not finite, or not equal to the means.
        """
        state: Mapping[str, Any] = load_exported(directory).state_dict()
        floating = {name: each for name, each in state.items() if each.is_floating_point()}
        wrong = [name for name, each in floating.items() if not torch.isfinite(each).all()]
        if wrong:
            raise CheckpointError(
                f"{directory}: merged weights that are not finite: {', '.join(wrong[:4])}. Nothing "
                f"was written. Merge checkpoints from before the run diverged."
            )
        names = sorted(floating, key=lambda name: floating[name].numel())
        names = names[:: max(1, len(names) // CHECKED_TENSORS)]
        for name in names:
            values = [
                weights[name].reshape(-1)[:CHECKED_VALUES].double() * coefficient
                for weights, coefficient in self._terms
            ]
            self.release()
            expected = torch.stack(values).sum(0)
            found = floating[name].reshape(-1)[:CHECKED_VALUES]
            allowed = torch.finfo(found.dtype).eps * expected.abs().max()
            if not (found.double() - expected).abs().max() <= allowed:
                raise CheckpointError(
                    f"{directory}: {name} is not the weighted mean of the checkpoints. Nothing was "
                    f"written. Please report this with the model's config."
                )
        return f"all weights are finite; {len(names)} tensors agree with the checkpoints"
