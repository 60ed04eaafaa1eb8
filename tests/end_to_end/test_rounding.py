"""What rounding alone does to the losses of plain PyTorch: the tolerances of other tests are above.

The loop of plain_pytorch.py beside itself, when nothing but a rounding is another.
"""

import numpy as np
import plain_optimizers
import plain_pytorch
import pytest
import test_mixtures_of_experts as experts
import test_optimizers as dense
import torch

LION = dense.Case(dense.LION, 2, offload=True)
MUON = dense.Case(dense.MUON, 2)


class Rounded:
    """An optimizer after whose step each weight is another by up to a rounding in float32."""

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


def most(curve: list[plain_pytorch.Step], other: list[plain_pytorch.Step], what="loss") -> float:
    first, second = ([getattr(step, what) for step in one] for one in (curve, other))
    return float(np.abs(np.array(first) / np.array(second) - 1).max())


@pytest.mark.soak
def test_a_rounding_of_weights_moves_lions_losses_as_far_as_deepspeed_is_away(corpus) -> None:
    curve, found = dense.plain_curve(LION, corpus), []
    for seed in range(5):

        def rounded(masters, weight_decay, seed=seed):
            return Rounded(plain_optimizers.lion(masters, weight_decay), masters, seed)

        found.append(most(curve, dense.plain_curve(LION, corpus, rounded)))
        print(f"Lion, weights rounded otherwise, {seed}: losses {found[-1]:.1e} away")
    assert 1e-4 < max(found) < dense.SIGN, "a sign of one value, and what comes of it"
    assert sorted(found)[1] < 1e-6, "and without that nothing"


@pytest.mark.soak
@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_newton_schulz_in_another_precision_moves_muons_losses(
    corpus, monkeypatch, model, dtype
) -> None:
    def curve():
        if model == "llama":
            return dense.plain_curve(MUON, corpus)
        return experts.plain_curve("mixtral", corpus, muon=True)

    exact = curve()  # in float64
    monkeypatch.setattr(plain_optimizers, "PRECISION", dtype)
    other = curve()
    print(f"Muon, {model}, Newton-Schulz in {dtype}: losses {most(exact, other):.1e} away")
    allowed = {torch.float32: 1e-6, torch.float16: dense.FP16, torch.bfloat16: 1e-3}[dtype]
    if model == "mixtral":
        auxiliary = most(exact, other, "auxiliary")
        print(f"Muon, {model}, Newton-Schulz in {dtype}: auxiliary losses {auxiliary:.1e} away")
        assert auxiliary < (1e-6 if dtype is torch.float32 else 5 * experts.FP16)
        allowed = {torch.float16: experts.FP16, torch.bfloat16: experts.FP16}.get(dtype, 1e-6)
    assert most(exact, other) < allowed
