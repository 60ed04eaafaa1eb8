"""The effect of rounding alone on the losses of plain PyTorch, as a bound for tolerances.

The tolerances of other tests are above it. The reference loop is compared with itself, with only
one rounding changed.
"""

import numpy as np
import pytest
import torch

from tests.end_to_end import plain_optimizers, plain_pytorch
from tests.end_to_end import test_mixtures_of_experts as experts
from tests.end_to_end import test_optimizers as dense

LION = dense.Case(dense.LION, 2, offload=True)
MUON = dense.Case(dense.MUON, 2)


class Rounded:
    """An optimizer that changes each weight by up to one float32 rounding after each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: dict, seed: int):
        self._optimizer, self._masters = optimizer, masters
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def param_groups(self):
        return self._optimizer.param_groups

    def step(self) -> None:
        self._optimizer.step()
        for master in self._masters.values():
            noise = torch.rand(master.shape, generator=self._generator, dtype=torch.float64)
            master.copy_(master.double() * (1 + 1.2e-7 * (2 * noise - 1)))


def max_difference(
    curve: list[plain_pytorch.Step], other: list[plain_pytorch.Step], name="loss"
) -> float:
    """Return the largest relative difference of a figure of two curves."""
    first, second = ([getattr(step, name) for step in steps] for steps in (curve, other))
    return float(np.abs(np.array(first) / np.array(second) - 1).max())


@pytest.mark.soak
def test_rounding_weights_changes_lions_losses_as_much_as_deepspeed_does(corpus) -> None:
    curve, differences = dense.plain_curve(LION, corpus), []
    for seed in range(5):

        def rounded(masters, weight_decay, seed=seed):
            return Rounded(plain_optimizers.lion(masters, weight_decay), masters, seed)

        differences.append(max_difference(curve, dense.plain_curve(LION, corpus, rounded)))
        print(f"Lion, weights rounded differently, {seed}: losses {differences[-1]:.1e} away")
    assert 1e-4 < max(differences) < dense.SIGN, "the sign of one value changes"
    assert sorted(differences)[1] < 1e-6, "without a change of sign the losses are equal"


@pytest.mark.soak
@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_precision_of_newton_schulz_changes_muons_losses(
    corpus, monkeypatch, model, dtype
) -> None:
    def curve():
        if model == "llama":
            return dense.plain_curve(MUON, corpus)
        return experts.plain_curve("mixtral", corpus, muon=True)

    exact = curve()  # in float64
    monkeypatch.setattr(plain_optimizers, "PRECISION", dtype)
    other = curve()
    print(
        f"Muon, {model}, Newton-Schulz in {dtype}: losses {max_difference(exact, other):.1e} away"
    )
    allowed = {torch.float32: 1e-6, torch.float16: dense.FP16, torch.bfloat16: 1e-3}[dtype]
    if model == "mixtral":
        auxiliary = max_difference(exact, other, "auxiliary")
        print(f"Muon, {model}, Newton-Schulz in {dtype}: auxiliary losses {auxiliary:.1e} away")
        assert auxiliary < (1e-6 if dtype is torch.float32 else 5 * experts.FP16)
        allowed = {torch.float16: experts.FP16, torch.bfloat16: experts.FP16}.get(dtype, 1e-6)
    assert max_difference(exact, other) < allowed
