"""An optimizer of one's own is named by its path, and refused where ZeRO would change its steps."""

import sys

import pytest
import torch

from zerolm.distributed.layout import Layout
from zerolm.ds_config.optimizers import optimizer_problems
from zerolm.ds_config.profile import Profile
from zerolm.optim import custom, trial
from zerolm.plan import memory

SOURCE = """
import torch

class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.sign(), alpha=-group["lr"])

class Normalised(SignSGD):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])

class Clipped(SignSGD):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = max(1, parameter.grad.norm() / 100)
                parameter.add_(parameter.grad / norm, alpha=-group["lr"])

class Keywords(SignSGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)

class Broken(SignSGD):
    def step(self):
        raise RuntimeError("no step")
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_optimizers.py").write_text(SOURCE)
    (tmp_path / "syntax_error.py").write_text("class SignSGD(:")
    monkeypatch.syspath_prepend(tmp_path)
    custom.optimizer_class.cache_clear()
    yield
    sys.modules.pop("own_optimizers", None)
    custom.optimizer_class.cache_clear()


def profile(name: str, **params) -> Profile:
    optimizer = {"type": name, "params": params}
    return Profile.parse(
        {
            "optimizer": optimizer,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        }
    )


def test_an_elementwise_optimizer_is_accepted_and_its_states_are_counted():
    found = profile("own_optimizers.SignSGD", momentum=0.5)
    assert optimizer_problems(found, on_gpu=False) == []
    keywords = profile("own_optimizers.Keywords", momentum=0.5)
    assert optimizer_problems(keywords, on_gpu=False) == []
    shapes = {"weight": (10, 10)}
    assert memory.model_states(shapes, found, Layout(1)).optimizer == 4 * 100
    adamw = Profile.parse({"zero_optimization": {"stage": 1}})
    assert memory.model_states(shapes, adamw, Layout(1)).optimizer == 8 * 100


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("own_optimizers.Normalised", {}, "updates shards of a matrix differently"),
        ("own_optimizers.Normalised", {"lr": 1e-9}, "updates shards of a matrix differently"),
        ("own_optimizers.Clipped", {}, "updates shards of a matrix differently"),
        ("own_optimizers.Keywords", {"momentun": 0.5}, "TypeError"),
        ("syntax_error.SignSGD", {}, "cannot be imported (SyntaxError"),
        ("own_optimizers.Broken", {}, "RuntimeError: no step"),
        ("own_optimizers.SignSGD", {"momentun": 0.5}, 'Did you mean "momentum"?'),
        ("own_optimizers.Missing", {}, "cannot be imported"),
        ("missing_module.SignSGD", {}, "put its directory on PYTHONPATH"),
        ("json.JSONDecoder", {}, "not a class derived from torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_the_reason(name, params, text):
    (problem,) = optimizer_problems(profile(name, **params), on_gpu=False)
    assert problem.startswith("optimizer.") and text in problem.replace("is not a", "not a")


@pytest.mark.parametrize(("name", "moments"), [("SGD", 0), ("RMSprop", 1), ("AdamW", 2)])
def test_states_of_torchs_optimizers_are_counted_by_a_step(name, moments):
    assert trial.num_moments(name, {}) == moments


def test_betas_are_those_of_the_constructor():
    assert custom.takes_betas("AdamW") and not custom.takes_betas("own_optimizers.SignSGD")
    assert custom.parameter_names(torch.optim.SGD)[0] == "lr"
