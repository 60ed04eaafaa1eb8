"""One rank of test_qk_clip.py: checks for each ds config that exactly the chosen heads are scaled.

Two engines take the same first step, one of them with clipping; then the first one gets a step that
is refused.
"""

import os
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from tests.ds_config_checks import run_checks
from zerolm.distributed.collectives import gather_objects
from zerolm.engine.qk_clip import HeadOutputs, QkClip
from zerolm.engine.step_gate import StepGate

WIDTH, HEADS, HEAD_DIM = 13, 3, 5  # no boundary of a rank's partition is that of a head
THRESHOLD, LOGITS = 2.0, [1.5, 7.0, 5.0]
QUERIES = tuple((head, 0.5, HEAD_DIM) for head in range(HEADS))
VALUES = tuple((head, power, 2) for head in range(HEADS) for power in (1.0, 0.0))
CLIPPED = [
    HeadOutputs("0.weight", QUERIES),
    HeadOutputs("0.bias", QUERIES),
    HeadOutputs("2.weight", VALUES, outputs_last=True),  # as GPT-2 has it
]
# By hand: 2/7 and 2/5 to the powers above, for each output of the three tensors.
GAMMAS = [1.0, 2 / 7, 2 / 5]
OF_QUERIES = [gamma**0.5 for gamma in GAMMAS for _ in range(HEAD_DIM)]
OF_VALUES = [factor for gamma in GAMMAS for factor in (gamma, gamma, 1.0, 1.0)]


def new_engine(config: dict) -> Any:
    torch.manual_seed(0)
    with deepspeed.zero.Init(
        config_dict_or_path=config, enabled=config["zero_optimization"]["stage"] == 3
    ):
        torch.manual_seed(0)
        sizes = (WIDTH, HEADS * HEAD_DIM), (len(OF_VALUES), HEADS * HEAD_DIM)
        model = nn.Sequential(nn.Linear(*sizes[0]), nn.Identity(), nn.Linear(*sizes[1][::-1]))
        model[2].weight = nn.Parameter(torch.randn(WIDTH, len(OF_VALUES)))
        model[2].forward = lambda x: x[..., :WIDTH] @ model[2].weight + model[2].bias
    for parameter in model.parameters():
        parameter.use_muon = len(getattr(parameter, "ds_shape", parameter.shape)) == 2
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def backward(engine: Any, batch: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    seed = 10 * batch + int(os.environ["RANK"])
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    engine.set_gradient_accumulation_boundary(True)
    loss = engine(inputs.to(engine.device, dtype)).float().square().mean()
    engine.backward(loss, scale_wrt_gas=False)


def weights(engine: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return full copies of the master weights, and of the weights of the model."""
    named = dict(engine.module.named_parameters())
    masters = {name: safe_get_full_fp32_param(each).clone() for name, each in named.items()}
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return masters, {name: each.detach().clone() for name, each in named.items()}


def problems_of(config: dict) -> list[str]:
    problems = []
    plain, clipped = new_engine(config), new_engine(config)
    gates = StepGate(plain), StepGate(clipped)
    qk_clip = QkClip(clipped, THRESHOLD, [CLIPPED])

    def step(engine: Any, gate: StepGate, batch: int, refused: bool, logits: list[float]) -> None:
        backward(engine, batch)
        with qk_clip.clipping([logits]):
            gate.step(engine, refused, lambda norm: False)

    step(plain, gates[0], 1, False, LOGITS)  # the other engine's optimizer has no hook
    step(clipped, gates[1], 1, False, LOGITS)
    expected, _ = weights(plain)
    of_values = torch.tensor(OF_VALUES, dtype=torch.float64).float()
    of_queries = torch.tensor(OF_QUERIES, dtype=torch.float64).float()
    factors = {"0.weight": of_queries[:, None], "0.bias": of_queries, "2.weight": of_values}
    masters, model = weights(clipped)
    for name, master in masters.items():
        if not torch.equal(master, expected[name] * factors.get(name, torch.ones(()))):
            problems.append(f"{name}: the master weights are not those of a step and a clip")
        if not torch.equal(model[name], master.to(model[name].dtype)):
            problems.append(f"{name}: the model does not have the master weights")
    step(clipped, gates[1], 2, True, LOGITS)
    step(clipped, gates[1], 3, True, [float("nan")] * HEADS)
    if not all(map(torch.equal, weights(clipped)[0].values(), masters.values())):
        problems.append("a refused step was clipped")
    step(plain, gates[0], 4, False, LOGITS)
    step(clipped, gates[1], 4, False, [1.0, float("nan"), THRESHOLD])
    if torch.equal(weights(clipped)[0]["0.weight"], masters["0.weight"]):
        problems.append("the next step was not taken")
    for engine in (plain, clipped):
        engine.destroy()
    return [line for lines in gather_objects(problems) for line in lines]


if __name__ == "__main__":
    run_checks(problems_of)
