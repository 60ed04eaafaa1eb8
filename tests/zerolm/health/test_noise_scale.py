"""The noise scale against closed forms. ZeRO, accumulation, several ranks: test_parity.py."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerolm.health.noise_scale import (
    DECAY,
    Estimate,
    SmallBatches,
    SmallBatchSums,
    average,
    estimate,
)

CPU = torch.device("cpu")


def test_the_estimate_is_unbiased():
    generator = np.random.default_rng(0)
    true = generator.standard_normal(50)
    deviation, n, batches, world_size = 3.0, 16, 8, 2
    found = Estimate()
    singles = []
    for _ in range(4000):
        small = true + deviation / math.sqrt(n) * generator.standard_normal((batches, 50))
        big = small.mean(0)
        # Scaled as in `MicroBatches`: sum over n targets, times world_size / all targets.
        backward = small * (n * world_size / (n * batches))
        sums = SmallBatchSums((backward**2).sum() / n**2, batches / n, n * batches, batches, 0)
        new = estimate(sums, float(np.linalg.norm(big)), world_size)
        singles.append(new)
        found = average(found, new)
    noise, signal = np.mean(singles, axis=0)
    assert noise == pytest.approx(50 * deviation**2, rel=0.02)
    assert signal == pytest.approx(true @ true, rel=0.02)
    weights = DECAY ** np.arange(4000)[::-1]
    expected = [(weights @ column) * (1 - DECAY) for column in np.array(singles).T]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert found.noise_scale_tokens == pytest.approx(found.noise / found.signal)


def test_the_estimate_is_unbiased_for_micro_batches_of_unequal_sizes():
    generator = np.random.default_rng(1)
    true = generator.standard_normal(40)
    sizes = np.array([4, 8, 16, 36])
    singles = []
    for _ in range(8000):
        noise = 2.0 * generator.standard_normal((4, 40)) / np.sqrt(sizes)[:, None]
        small = true + noise
        big = sizes @ small / sizes.sum()
        backward = small * (sizes / sizes.sum())[:, None]
        squares = ((backward**2).sum(1) / sizes**2).sum()
        sums = SmallBatchSums(squares, (1 / sizes).sum(), sizes.sum(), 4, 0)
        assert not sums.are_equal
        singles.append(estimate(sums, float(np.linalg.norm(big)), 1))
    noise, signal = np.mean(singles, axis=0)
    assert noise == pytest.approx(40 * 2.0**2, rel=0.02)
    assert signal == pytest.approx(true @ true, rel=0.02)


def test_there_is_no_estimate_without_enough_information():
    known = SmallBatchSums(1.0, 2.0, 2.0, 2, 0)
    assert estimate(known, 1.0, 1) is not None
    assert estimate(known._replace(unknown=1), 1.0, 1) is None
    assert estimate(known._replace(batches=1), 1.0, 1) is None
    assert estimate(known, math.inf, 1) is None
    assert Estimate(1.0, -1.0).noise_scale_tokens is None
    assert Estimate(-1.0, 1.0).noise_scale_tokens is None


class Tied(nn.Module):
    def __init__(self, use_reentrant: bool | None = None):
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.layer = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)  # like an expert without tokens
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.embed.weight
        self.use_reentrant = use_reentrant

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(2):  # a shared layer
            if self.use_reentrant is None:
                x = self.layer(x)
            else:
                x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def figures(model: nn.Module, scale: float = 1.0) -> tuple[list[float], float]:
    small = SmallBatches(list(model.parameters()), CPU)
    ids = torch.arange(20).view(2, 10)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) * scale
    with small.backward(torch.tensor(20)):
        loss.backward()
    expected = sum(
        each.grad.double().square().sum().item()
        for each in model.parameters()
        if each.grad is not None
    )
    return small.figures.tolist(), expected


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_a_tied_weight_and_a_shared_layer_count_once_with_their_full_gradient(use_reentrant):
    found, expected = figures(Tied(use_reentrant))
    assert found[0] * 20**2 == pytest.approx(expected, rel=1e-6)
    assert found[1:] == [1 / 20, 20, 1, 0]


def test_a_step_is_not_measured_if_a_hook_is_called_twice():
    found, _ = figures(Tied(use_reentrant=True))
    assert found == [0, 0, 0, 0, 1]


def test_observing_does_not_change_gradients():
    torch.manual_seed(0)
    watched = Tied()
    torch.manual_seed(0)
    alone = Tied()
    figures(watched)
    ids = torch.arange(20).view(2, 10)
    nn.functional.cross_entropy(alone(ids).flatten(0, 1), ids.flatten()).backward()
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)
    assert not any(each._backward_hooks for each in watched.parameters()), "hooks are removed"


def test_the_loss_scale_is_divided_out():
    known = SmallBatchSums(8.0, 2.0, 8.0, 4, 0)
    scaled = known._replace(squares=8.0 * 2.0**20)
    assert estimate(scaled, 1.5, 2, 1024.0) == estimate(known, 1.5, 2)
