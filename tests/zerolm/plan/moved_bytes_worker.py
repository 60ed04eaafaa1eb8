"""One rank: counts the bytes that DeepSpeed's operations read and write, per parameter.

    RANK=0 WORLD_SIZE=1 ... python moved_bytes_worker.py OUTPUT.json

Rank 0 writes `{stage: bytes of a step and its micro-batches}` for the shipped profiles. The model
is one matrix; the bytes of its own forward and backward pass in plain PyTorch are subtracted, and
those of collectives are not counted at stages 1 and 2.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import ROOT
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.resolve import resolve_profile
from zerolm.engine.gradient_sums import spare_memory_traffic
from zerolm.engine.step_gate import StepGate
from zerolm.optim.parameter_groups import parameter_groups
from zerolm.parts.settings import RunSettings

SIZE = 1024
FILLS = {"copy_", "zero_", "fill_"}  # do not read what they overwrite
ACCUMULATION = 4


class MovedBytes(TorchDispatchMode):
    """Sums the bytes of all tensors that operations read, and of those that they write."""

    def __init__(self, with_collectives: bool = True) -> None:
        super().__init__()
        self.bytes = 0
        self._with_collectives = with_collectives

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = operation(*args, **(kwargs or {}))
        arguments = operation._schema.arguments
        names = [argument.name for argument in arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
        is_view = not written and any(each.alias_info for each in operation._schema.returns)
        is_counted = self._with_collectives or not operation._schema.name.startswith("c10d::")
        if is_counted and not is_view and not operation._schema.name.startswith("aten::empty"):
            name = operation._schema.name.removeprefix("aten::")
            read = [value for key, value in given.items() if not (name in FILLS and key == "self")]
            made = [given[key] for key in written if key in given] if written else found
            self.bytes += size_of(read) + size_of(made)
        return found


def size_of(values: Any) -> int:
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors)


def matrix() -> torch.nn.Linear:
    return torch.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)


def of_the_model(inputs: torch.Tensor) -> int:
    """Return the bytes of a forward and backward pass in plain PyTorch."""
    model = matrix()
    with MovedBytes() as counted:
        model(inputs).float().sum().backward()
    return counted.bytes


def measure(stage: int) -> float:
    """Return the bytes per parameter that DeepSpeed adds to a step and its micro-batches."""
    profile = Profile.read(ROOT / f"ds_configs/zero{stage}.json")
    profile.json["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    resolved = resolve_profile(
        profile,
        RunSettings(learning_rate=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1),
        hidden_size=SIZE,
        micro_batch_size=1,
        accumulation=ACCUMULATION,
        replicas=distributed.get_world_size(),
        warmup_steps=1,
        total_steps=1,
    )
    model = matrix()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model, 0.1), config=resolved.json
    )
    spare_memory_traffic(engine)
    gate = StepGate(engine)
    inputs = torch.randn(1, SIZE, dtype=torch.bfloat16)
    for _ in range(2):  # the optimizer's states are made in the first
        with MovedBytes(with_collectives=stage == 3) as counted:
            for micro in range(ACCUMULATION):
                engine.set_gradient_accumulation_boundary(micro == ACCUMULATION - 1)
                engine.backward(engine(inputs).float().sum())
            gate.step(engine, False, lambda norm: False)
    engine.destroy()
    return (counted.bytes - ACCUMULATION * of_the_model(inputs)) / SIZE**2


deepspeed.init_distributed("gloo")
stages = (1, 2) if distributed.get_world_size() > 1 else (1, 2, 3)
moved = {stage: measure(stage) for stage in stages}
if distributed.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(moved))
distributed.barrier()
os._exit(0)
