"""One rank of test_gradient_sums.py: the same steps with and without fewer passes over memory.

    RANK=0 WORLD_SIZE=2 ... python gradient_sums_worker.py REPORT.json

Rank 0 writes {stage: tensors of the checkpointed state that differ in a bit}, and for stage 1 which
gradients of a micro-batch are left after it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from tests import ROOT
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.resolve import resolve_profile
from zerolm.optim.gradient_sums import spare_memory_traffic

WIDTH, ACCUMULATION, STEPS = 24, 3, 4
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Model(nn.Module):
    """Has a weight that is used twice, one that is never used, and one that is not always."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.seldom = nn.Linear(WIDTH, WIDTH, bias=False)
        self.never = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor, batch: int) -> torch.Tensor:
        hidden = self.tied(torch.tanh(self.tied(inputs)))
        return (self.seldom(hidden) if batch % 3 else hidden).float().square().sum()


def engine_of(stage: int, as_deepspeed_does: bool) -> Any:
    profile = Profile.read(ROOT / f"ds_configs/zero{stage}.json")
    resolved = resolve_profile(
        profile,
        Settings(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1),
        hidden_size=WIDTH,
        micro_batch_size=1,
        accumulation=ACCUMULATION,
        replicas=RANKS,
        warmup_steps=1,
        total_steps=1,
    ).json
    if as_deepspeed_does:
        resolved["bf16"].pop("immediate_grad_update", None)
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=resolved
    )
    if not as_deepspeed_does:
        spare_memory_traffic(engine)
    return engine


def train(engine: Any) -> list[str]:
    """Return the parameters that had a gradient of their own after a micro-batch."""
    left = []
    for batch in range(STEPS * ACCUMULATION):
        generator = torch.Generator().manual_seed(2 * batch + RANK)
        scale = 1e-3 if batch < ACCUMULATION else 3.0  # the first step is not clipped, others are
        inputs = scale * torch.randn(2, WIDTH, generator=generator)
        engine.backward(engine(inputs.bfloat16(), batch))
        left += [name for name, each in engine.module.named_parameters() if each.grad is not None]
        engine.step()
    return left


def states(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = parameter.detach().clone()
        found[f"{name} master"] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key)
    return found


def compare(stage: int) -> dict[str, Any]:
    usual, spared = (engine_of(stage, each) for each in (True, False))
    train(usual)
    left = train(spared)
    expected, found = states(usual), states(spared)
    assert expected["tied.weight exp_avg_sq"].abs().sum() > 0
    different = [name for name, each in expected.items() if not torch.equal(each, found[name])]
    norms = usual.get_global_grad_norm(), spared.get_global_grad_norm()
    return {"different": different, "left": sorted(set(left)), "norms": [float(n) for n in norms]}


deepspeed.init_distributed("gloo")
report = {stage: compare(stage) for stage in (1, 2)}
if RANK == 0:
    Path(sys.argv[1]).write_text(json.dumps(report))
torch.distributed.barrier()
os._exit(0)
