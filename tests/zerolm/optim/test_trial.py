"""An own optimizer is tried out as DeepSpeed drives it, and its states keep their dtype."""

import time
from typing import ClassVar

import pytest
import torch

from zerolm.optim import custom, trial


class Scaled(torch.optim.Optimizer):
    """Momentum kept in bfloat16; subclasses differ in one rule."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def scale(self, group) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            scale = self.scale(group)
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["average"] = torch.zeros_like(each, dtype=torch.bfloat16)
                state["average"].copy_(state["average"].float().lerp_(each.grad, 0.1))
                each.add_(state["average"].float(), alpha=-group["lr"] * scale)


class OfAll(Scaled):
    def scale(self, group):
        values = [each for one in self.param_groups for each in one["params"]]
        return 1 / float(1e-9 + torch.stack([each.grad.norm() for each in values]).norm())


class CountsInGroup(Scaled):
    def scale(self, group):
        group["count"] = group.get("count", 0) + 1
        return 1 / group["count"]


class CountsInObject(Scaled):
    count = 0

    def scale(self, group):
        self.count += 1
        return 1 / self.count


class WithoutRate(Scaled):
    def scale(self, group):
        return 0.1 / group["lr"]


class InBlocks(Scaled):
    """Blocks of 4,096 values have a scale each, as in 8-bit states; shards of others have other."""

    def scale(self, group):
        first = group["params"][0].grad.flatten()
        return float(first[:4096].abs().max()) if len(first) > 4096 else 1.0


class Decomposes(Scaled):
    """Takes minutes on a shard of thousands of values, as Shampoo does."""

    sizes: ClassVar = []

    def scale(self, group):
        self.sizes.extend(each.numel() for each in group["params"])
        if max(self.sizes) > 1000:
            raise AssertionError("such a step would take minutes")
        gradient = group["params"][0].grad
        return 1 / float(1e-9 + torch.linalg.matrix_norm(torch.outer(*2 * [gradient.flatten()])))


class RaisesFallingNorms(Scaled):
    """Scales a gradient up to an average of its norms, as AdaNorm does; the first steps do not."""

    def scale(self, group):
        [norm] = [float(each.grad.norm()) for each in group["params"]]
        group["norm"] = 0.95 * group.get("norm", 0.0) + 0.05 * norm
        return max(1.0, group["norm"] / norm) if norm else 1.0


class Slow(Scaled):
    def scale(self, group):
        time.sleep(0.001)
        return 1.0


class Compiled(Scaled):
    @torch.no_grad()
    def step(self, closure=None):
        @torch.compile
        def compiled(gradient):
            assert not torch.compiler.is_compiling(), "compilation takes minutes"
            return 2 * gradient

        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(compiled(each.grad), alpha=group["lr"])


class Wrapper(Scaled):
    def __init__(self, params, lr=1e-3):
        self.param_groups = [{"lr": lr, **group} for group in params]
        self.state = {}


class ScheduleFree(Scaled):
    def train(self): ...

    def eval(self): ...


@pytest.mark.parametrize(
    ("kind", "stage", "text"),
    [
        (Scaled, 2, ""),
        (Scaled, 3, ""),
        (OfAll, 2, "differently from the full matrix"),
        (CountsInGroup, 2, ""),
        (CountsInGroup, 3, "stage 3"),
        (CountsInObject, 2, "after its state_dict() is loaded"),
        (WithoutRate, 2, "does not read `lr`"),
        (ScheduleFree, 2, "train() and eval()"),
        (InBlocks, 2, "differently from the full matrix"),
        (Decomposes, 2, "differently from the full matrix"),
        (RaisesFallingNorms, 2, "differently from the full matrix"),
        (Compiled, 2, ""),
        (Wrapper, 2, "its constructor does not call torch.optim.Optimizer.__init__()"),
    ],
)
def test_the_trial_refuses_what_would_change_the_curve(kind, stage, text):
    problem = trial.trial_problem(f"{__name__}.{kind.__name__}", {}, stage)
    assert text in problem and bool(problem) == bool(text)


def test_a_slow_trial_is_announced_and_its_large_shards_are_left_out_in_time(monkeypatch, capsys):
    monkeypatch.setattr(trial, "ANNOUNCED_SECONDS", 0)
    monkeypatch.setattr(trial, "LARGE_SECONDS", 0)
    assert trial.trial_problem(f"{__name__}.Slow", {}, 2) == ""
    running, ended = capsys.readouterr().err.splitlines()
    assert running == (
        f"note: optimizer.type: {__name__}.Slow: the trial of its steps on shards still runs"
    )
    assert ended.endswith("ends after 0 s, with few steps on large shards")
    small = trial.trial_problem(f"{__name__}.OfAll", {}, 2)
    assert "differently" in small, "what small shards show is refused whatever the time"


def test_a_quick_trial_prints_nothing(monkeypatch, capsys):
    monkeypatch.setattr(trial, "ANNOUNCED_SECONDS", 600)
    assert trial.trial_problem(f"{__name__}.Scaled", {}, 2) == ""
    assert capsys.readouterr() == ("", "")


def test_a_loaded_state_keeps_its_dtype():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        state = {"momentum_buffer": torch.tensor([1, 2**25 + 1, 3]).to(dtype)}
        optimizer.state[weight] = state
        again = torch.optim.SGD([weight], momentum=0.9)
        custom.preserve_state_dtypes(again)
        again.load_state_dict(optimizer.state_dict())
        loaded = again.state[weight]["momentum_buffer"]
        assert loaded.dtype == dtype and torch.equal(loaded, state["momentum_buffer"])
