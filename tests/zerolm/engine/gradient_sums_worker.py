"""One rank of test_gradient_sums.py: the same steps as DeepSpeed takes them, and as zerolm does.

    RANK=0 WORLD_SIZE=2 ... python gradient_sums_worker.py REPORT.json

Rank 0 writes {stage and way to reduce: report}: `different`, {tensor of the checkpointed state that
differs in a bit: relative distance}; `left`, which gradients of a micro-batch are left after it;
`norms` of both; `sent`, for both {collective: (calls, values per parameter) of a step}; `early`,
how many buckets of the last step were reduced before its backward pass had ended, of how many.
"""

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from tests.zerolm.ds_config.ds_cases import shipped
from zerolm.engine import gradient_reduction, gradient_sums, reduction_choice
from zerolm.engine.step_gate import StepGate

WIDTH, ACCUMULATION, STEPS = 24, 3, 4
BUCKET = 200  # values, of which a rank owns several
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor")
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


def engine_of(stage: int, as_deepspeed_does: bool, key: bool | None) -> Any:
    resolved = shipped(
        f"zero{stage}.json",
        hidden_size=WIDTH,
        micro_batch_size=1,
        accumulation=ACCUMULATION,
        replicas=RANKS,
    )
    resolved["zero_optimization"]["reduce_bucket_size"] = BUCKET
    if key is not None and not as_deepspeed_does:
        resolved["zero_optimization"][reduction_choice.KEY] = key
    if as_deepspeed_does:
        resolved["bf16"].pop("immediate_grad_update", None)
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=resolved
    )
    if not as_deepspeed_does:
        made = []
        reduce = gradient_reduction.reduce_to_owners
        gradient_sums.reduce_to_owners = lambda *given: made.append(reduce(*given)) or made[0]
        gradient_sums.spare_memory_traffic(engine)
        engine.reduction = made[0]
    return engine


@contextmanager
def counted(found: Counter) -> Iterator[None]:
    """Count the calls and the values of what reduces gradients."""
    usual = {name: getattr(torch.distributed, name) for name in COLLECTIVES}

    def counts(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            tensors = [each for each in (*args, *options.values()) if torch.is_tensor(each)]
            values = max(each.numel() for each in tensors)  # of the input
            if values > 1:  # not a norm
                found[f"{name} calls"] += 1
                found[f"{name} values"] += values
            return usual[name](*args, **options)

        return call

    for name in COLLECTIVES:
        setattr(torch.distributed, name, counts(name))
    yield
    for name, function in usual.items():
        setattr(torch.distributed, name, function)


def train(engine: Any) -> list[str]:
    """Return the parameters that had a gradient of their own after a micro-batch."""
    left, gate = [], StepGate(engine)
    for batch in range(STEPS * ACCUMULATION):
        generator = torch.Generator().manual_seed(2 * batch + RANK)
        scale = 1e-3 if batch < ACCUMULATION else 3.0  # the first step is not clipped, others are
        inputs = scale * torch.randn(2, WIDTH, generator=generator)
        engine.backward(engine(inputs.bfloat16(), batch))
        left += [name for name, each in engine.module.named_parameters() if each.grad is not None]
        gate.step(engine, False, lambda norm: False)
    return left


def states(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = parameter.detach().clone()
        found[f"{name} master"] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key)
    return found


def compare(stage: int, max_latency: float, key: bool | None) -> dict[str, Any]:
    reduction_choice.MAX_LATENCY = max_latency
    reduction_choice.FAST_BYTES_PER_SECOND = 1.0 if max_latency else 1e30
    sent, trained = [], []
    for as_deepspeed_does in (True, False):
        engine = engine_of(stage, as_deepspeed_does, key)
        sent.append(Counter())
        with counted(sent[-1]):
            left = train(engine)
        trained.append(engine)
    expected, found = map(states, trained)
    assert expected["tied.weight exp_avg_sq"].abs().sum() > 0
    different = {
        name: float((each - found[name]).norm() / each.norm())
        for name, each in expected.items() if not torch.equal(each, found[name])
    }  # fmt: skip
    size = sum(each.numel() for each in trained[0].module.parameters())
    norms = [float(each.get_global_grad_norm()) for each in trained]
    per_step = [
        {name: count / STEPS / (size if "values" in name else 1) for name, count in each.items()}
        for each in sent
    ]
    ours = trained[1].reduction
    early = (ours.early, len(ours.buckets)) if ours is not None else None
    return {"different": different, "left": sorted(set(left)), "norms": norms, "sent": per_step,
            "early": early}  # fmt: skip


deepspeed.init_distributed("gloo")
ways = {  # longest latency, and the key of the JSON
    "a call for each owner": (math.inf, None), "a call for all": (0.0, None),
    "false": (0.0, False), "true": (math.inf, True),
}  # fmt: skip
report = {
    f"{stage}, {way}": compare(stage, *given) for stage in (1, 2) for way, given in ways.items()
}
if RANK == 0:
    Path(sys.argv[1]).write_text(json.dumps(report))
torch.distributed.barrier()
os._exit(0)
