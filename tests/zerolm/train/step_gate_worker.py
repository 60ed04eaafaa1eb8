"""One rank of test_refusal.py: what a refused step leaves behind, for each ds config given.

    RANK=0 WORLD_SIZE=2 ... python refusal_worker.py REPORT.json CONFIG.json ...

The report of rank 0 has, for each config, what went wrong; nothing went wrong in an empty list.
Two engines see the same batches, but one has batches between them whose steps are refused: for
their norm, before they begin, and for a NaN on one rank.
"""

import hashlib
import json
import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from zerolm.distributed.collectives import gather_objects
from zerolm.distributed.process_group import release_shared_memory
from zerolm.train.step_gate import StepGate

WIDTH, ROWS = 48, 8
GOOD = (1, 2, 3)  # batches that both engines see


def new_engine(config: dict) -> Any:
    torch.manual_seed(0)
    with deepspeed.zero.Init(
        config_dict_or_path=config, enabled=config["zero_optimization"]["stage"] == 3
    ):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)]
        model = nn.Sequential(*layers)
    for parameter in model.parameters():
        parameter.use_muon = parameter.ndim == 2
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def backward(engine: Any, batch: int, factor: float = 1.0) -> None:
    """Accumulate the gradient of a batch, in two micro-batches."""
    dtype = next(engine.module.parameters()).dtype
    for micro_batch in range(2):
        seed = 1000 * batch + 10 * micro_batch + int(os.environ["RANK"])
        inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        engine.set_gradient_accumulation_boundary(micro_batch == 1)
        loss = engine(inputs.to(engine.device, dtype)).float().square().mean()
        engine.backward(loss * factor, scale_wrt_gas=False)


def digest(engine: Any) -> str:
    """Hash every tensor of the weights, the float32 masters and the optimizer's states."""
    optimizer, inner = engine.optimizer, engine.optimizer.optimizer
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    names += ("fp32_groups_flat_partition",)  # of ZeRO-1 and 2, ZeRO-3, and BF16_Optimizer
    (masters,) = (getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    tensors = [getattr(each, "ds_tensor", each) for each in engine.module.parameters()] + masters
    for master in masters:
        state = inner.state.get(master, {})
        # Zeros are as good as absent: the first gradient makes Muon's momentum, refused or not.
        states = [torch.as_tensor(state[name]) for name in sorted(state)]
        tensors += [tensor for tensor in states if tensor.count_nonzero()]
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    digest.update(str(float(getattr(optimizer, "loss_scale", 1.0))).encode())
    digest.update(str([group["lr"] for group in inner.param_groups]).encode())
    return digest.hexdigest()


def problems_of(config: dict) -> list[str]:
    muon = config["optimizer"]["type"] == "Muon"
    problems = []
    undisturbed, disturbed = new_engine(config), new_engine(config)
    plain, gate = StepGate(undisturbed), StepGate(disturbed)
    norms = []
    for batch in GOOD:
        backward(undisturbed, batch)
        plain.step(undisturbed, False, lambda norm: bool(norms.append(norm)))
        if abs(norms[-1] - float(undisturbed.get_global_grad_norm())) > 1e-6 * norms[-1]:
            problems.append("the norm that is judged is not the one that DeepSpeed reports")

        def refuse(engine: Any, why: str, refused: bool, number: int, factor: float) -> None:
            before, judged = digest(engine), []
            backward(engine, number, factor)

            def judge(norm: float) -> bool:
                judged.append(norm)
                return muon or norm > 100 * norms[0]  # Muon's is that of its update

            gate.step(engine, refused, judge)
            if digest(engine) != before:
                problems.append(f"{why}: something was changed")
            if engine.was_step_applied():
                problems.append(f"{why}: the step was taken")
            if why == "norm" and len({str(each) for each in gather_objects(judged)}) != 1:
                problems.append("the ranks were given different norms")

        if not muon or config["zero_optimization"] == {"stage": 2, "reduce_scatter": False}:
            refuse(disturbed, "norm", False, 100 + batch, 1e4)
        refuse(disturbed, "before it begins", True, 200 + batch, 1.0)
        if config.get("fp16") is None:  # there DeepSpeed lowers its loss scale for it, rightly
            nan = float("nan") if os.environ["RANK"] == "0" else 1.0
            refuse(disturbed, "a NaN on one rank", True, 300 + batch, nan)
            refuse(disturbed, "a NaN that DeepSpeed finds", False, 400 + batch, nan)
        backward(disturbed, batch)
        gate.step(disturbed, False, lambda norm: False)
        if not disturbed.was_step_applied():
            problems.append(f"batch {batch} was not taken")
        if digest(disturbed) != digest(undisturbed):
            problems.append(f"batch {batch}: the two engines differ")
    for engine in (undisturbed, disturbed):
        engine.destroy()
    return problems


def main(report: str, *paths: str) -> None:
    deepspeed.init_distributed("gloo" if get_accelerator().device_name() == "cpu" else "nccl")
    release_shared_memory()
    found = {}
    for path in paths:
        with open(path) as file:
            problems = problems_of(json.load(file))
        found[path] = [line for lines in gather_objects(problems) for line in lines]
    if os.environ["RANK"] == "0":
        with open(report, "w") as file:
            json.dump(found, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
