"""DeepSpeed's Lion and CPUAdam kernels, made to compute what they are called."""

import copy
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from zerolm.engine import kernel_fixes
from zerolm.engine.kernel_fixes import fix_lion_zero_updates, restore_beta_powers

BETAS = (0.9, 0.95)


# ---- Lion


class Lion(torch.optim.Optimizer):
    """Lion, with the sign of zero as Chen et al. have it, or as DeepSpeed's kernel on a CPU has."""

    def __init__(self, parameters, sign_of_zero: float):
        super().__init__(parameters, {"lr": 0.1, "weight_decay": 0.5})
        self.sign_of_zero = sign_of_zero

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                mix = 0.9 * momentum + 0.1 * parameter.grad
                sign = torch.where(mix == 0, self.sign_of_zero, mix.sign())
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * sign)
                momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)
        return "result"


@pytest.mark.parametrize("chunk", [4, 1 << 26])
def test_lion_moves_nothing_that_has_had_no_gradient(chunk, monkeypatch):
    """Values get their first gradient at different steps; one has none, one parameter never any."""
    monkeypatch.setattr(kernel_fixes, "LION_CHUNK", chunk)
    found = []
    for sign_of_zero, fix in ((0.0, False), (1.0, True), (1.0, False)):
        values = [torch.nn.Parameter(torch.arange(1.0, 7.0)) for _ in range(2)]
        optimizer = Lion(values, sign_of_zero)
        if fix:
            fix_lion_zero_updates(optimizer)
        for step in range(5):
            values[0].grad = torch.tensor([1.0, 0, -2, 0, 0, 0]) * (step % 2)
            values[0].grad[3] = step >= 3
            assert optimizer.step() == "result"
        found.append(torch.stack([value.detach() for value in values]))
    assert torch.equal(found[1], found[0]) and not torch.equal(found[2], found[0])


# ---- CPUAdam


def optimizer_of(size: int) -> DeepSpeedCPUAdam:
    values = torch.nn.Parameter(torch.linspace(-1, 1, size))
    return DeepSpeedCPUAdam([values], lr=1e-2, betas=BETAS, weight_decay=0.1, eps=1e-8)


def take_steps(optimizer: DeepSpeedCPUAdam, first: int, last: int) -> torch.Tensor:
    (values,) = optimizer.param_groups[0]["params"]
    for step in range(first, last + 1):
        values.grad = torch.sin(torch.arange(len(values)) * 0.1 + step)
        optimizer.step()
    return values.detach().clone()


@pytest.mark.parametrize("steps", [0, 1, 37, 2500])  # after 2065 the powers are zero
def test_a_resumed_cpu_adam_continues_bit_for_bit(steps):
    uninterrupted, resumed = optimizer_of(500), optimizer_of(500)
    at = take_steps(uninterrupted, 1, steps)
    resumed.param_groups[0]["params"][0].data.copy_(at)
    resumed.load_state_dict(copy.deepcopy(uninterrupted.state_dict()))
    # Inside Muon it is the optimizer of what is no matrix.
    restore_beta_powers(SimpleNamespace(aux_optimizer=resumed) if steps == 37 else resumed)
    expected = take_steps(uninterrupted, steps + 1, steps + 20)
    assert torch.equal(take_steps(resumed, steps + 1, steps + 20), expected)


def test_other_optimizers_are_left_alone():
    values = torch.nn.Parameter(torch.ones(3))
    values.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([values])
    optimizer.step()
    before = optimizer.state_dict()["state"][0]["step"].clone()
    restore_beta_powers(optimizer)
    assert optimizer.state_dict()["state"][0]["step"] == before
