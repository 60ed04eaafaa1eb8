"""One rank of test_step_gate.py: checks for each ds config that a refused step changes nothing.

Two engines train on the same batches. One of them gets further batches, whose steps are refused:
for their norm, before they start, or for a NaN on one rank. Further engines scale the gradients of
parameters before `gradient_clipping`.
"""

import hashlib
import os
from typing import Any

import deepspeed
import torch
from torch import nn

from tests.ds_config_checks import run_checks
from zerolm.distributed.collectives import gather_objects
from zerolm.engine.gradients import gradients
from zerolm.engine.states import master_partitions
from zerolm.engine.step_gate import StepGate

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
    """Accumulate the gradient of a batch of two micro-batches."""
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
    names += ("fp32_groups_flat_partition",)  # ZeRO-1 and 2, ZeRO-3, BF16_Optimizer
    (masters,) = (getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    tensors = [getattr(each, "ds_tensor", each) for each in engine.module.parameters()] + masters
    for master in masters:
        state = inner.state.get(master, {})
        # Zeros count as absent: the first gradient allocates Muon's momentum, even if refused.
        states = [torch.as_tensor(state[name]) for name in sorted(state)]
        tensors += [tensor for tensor in states if tensor.count_nonzero()]
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    digest.update(str(float(getattr(optimizer, "loss_scale", 1.0))).encode())
    digest.update(str([group["lr"] for group in inner.param_groups]).encode())
    return digest.hexdigest()


def clipping_problems(config: dict, batch: int, norm: float) -> list[str]:
    """Return how the norm of Adam's first moment after a step, a tenth of the clipped gradient's,
    differs from what a scale by parameter and `gradient_clipping` give.
    """
    problems, scale = [], 0.25
    for clip_norm in (2 * scale * norm, 0.5 * scale * norm):  # above the scaled norm; below it
        engine = new_engine(config)
        gate = StepGate(engine)
        gate.clip_norm = clip_norm

        def clip_parameters(engine: Any = engine) -> float:
            for _, values in gradients(engine):
                values.mul_(scale)
            return scale

        gate.clip_parameters = clip_parameters
        backward(engine, batch)
        gate.step(engine, False, lambda norm: False)
        state = engine.optimizer.optimizer.state
        moments = [state[each]["exp_avg"] for each in master_partitions(engine) if each in state]
        squares = gather_objects(sum(float(each.float().square().sum()) for each in moments))
        found, expected = sum(squares) ** 0.5, 0.1 * min(clip_norm, scale * norm)
        if abs(found / expected - 1) > 1e-2:  # bfloat16 gradients are 4e-3 apart
            problems.append(f"clipping at {clip_norm}: first moment {found}, not {expected}")
        engine.destroy()
    return problems


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
            problems.append("the gate's norm is not the one that DeepSpeed reports")

        def refuse(engine: Any, why: str, refused: bool, number: int, factor: float) -> None:
            before, seen_norms = digest(engine), []
            backward(engine, number, factor)

            def should_refuse(norm: float) -> bool:
                seen_norms.append(norm)
                return muon or norm > 100 * norms[0]  # Muon's norm is its update's

            gate.step(engine, refused, should_refuse)
            if digest(engine) != before:
                problems.append(f"{why}: the engine's state has changed")
            if engine.was_step_applied():
                problems.append(f"{why}: the step was applied")
            if why == "norm" and len({str(each) for each in gather_objects(seen_norms)}) != 1:
                problems.append("ranks have different norms")

        if not muon or config["zero_optimization"] == {"stage": 2, "reduce_scatter": False}:
            refuse(disturbed, "norm", False, 100 + batch, 1e4)
        refuse(disturbed, "before it starts", True, 200 + batch, 1.0)
        if config.get("fp16") is None:  # with fp16 DeepSpeed lowers its loss scale for it
            nan = float("nan") if os.environ["RANK"] == "0" else 1.0
            refuse(disturbed, "a NaN on one rank", True, 300 + batch, nan)
            refuse(disturbed, "a NaN that DeepSpeed finds", False, 400 + batch, nan)
        backward(disturbed, batch)
        gate.step(disturbed, False, lambda norm: False)
        if not disturbed.was_step_applied():
            problems.append(f"the step of batch {batch} was not applied")
        if digest(disturbed) != digest(undisturbed):
            problems.append(f"batch {batch}: the two engines differ")
    for engine in (undisturbed, disturbed):
        engine.destroy()
    if not muon:
        problems += clipping_problems(config, GOOD[0], norms[0])
    return [line for lines in gather_objects(problems) for line in lines]


if __name__ == "__main__":
    run_checks(problems_of)
