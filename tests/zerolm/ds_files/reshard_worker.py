"""One rank of test_reshard.py: trains and saves, or loads a checkpoint of another topology.

    RANK=0 WORLD_SIZE=2 ... python reshard_worker.py JOBS.json

Each job has a DeepSpeed config (`config`), the checkpoint's directory (`checkpoint`), and a file
(`state`) to which rank 0 writes the complete state of the engine, gathered by DeepSpeed's
`safe_get_full_*`. `do` is `save`, `reshard`, `load` for ours on the same topology, or `native` for
DeepSpeed's own loading. A resharded engine saves to `again` and takes further steps.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from zerolm.common.errors import CheckpointError
from zerolm.ds_files import checkpoints, reshard
from zerolm.engine import shared_memory
from zerolm.optim import custom
from zerolm.optim.parameter_groups import parameter_groups

WORDS, WIDTH, STEPS, ROWS = 37, 9, 3, 12  # odd sizes, so that all parts have padding


class TinyModel(nn.Module):
    """A tied or untied model with odd shapes, a buffer that is part of it, and frozen values."""

    def __init__(self, tied: bool):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, 13)
        self.norm = nn.LayerNorm(13)
        self.out = nn.Linear(13, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros(3))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.out(self.norm(self.hidden(self.embed(tokens) + self.shift).relu())))


class Own(torch.optim.Optimizer):
    """A user's own: a bfloat16 average, integers, a fraction, and counts in the groups."""

    def __init__(self, params, lr: float = 1e-2, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "counted": 0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["counted"] += 1
            group["added"] = group.get("added", 0.5) + 1
            for each in (each for each in group["params"] if each.grad is not None):
                state = self.state[each]
                if not state:
                    state["step"], state["decay"] = 0, 1.0
                    state["average"] = torch.zeros_like(each, dtype=torch.bfloat16)
                    state["signs"] = torch.zeros_like(each, dtype=torch.int32)
                state["step"] += 1
                state["decay"] *= 0.3
                state["average"].copy_(state["average"].float().lerp_(each.grad, 0.1))
                state["signs"].add_(each.grad.sign().int())
                update = state["average"].float() * (1 + state["decay"]) + 1e-3 * state["signs"]
                each.sub_(update, alpha=group["lr"] / group["counted"])


def new_engine(job: dict, seed: int):
    torch.manual_seed(seed)
    config = job["config"]
    bf16 = config.get("bf16", {}).get("enabled", False)
    model = TinyModel(job["tied"]).to(torch.bfloat16 if bf16 else torch.float32)
    groups = parameter_groups(model, 0.1)
    if config["optimizer"]["type"] == "Adagrad":  # ZeRO-3 rebuilds it with one group
        groups = list(model.parameters())
    own = None
    if config["optimizer"]["type"] == "Own":
        config, own = {key: config[key] for key in config if key != "optimizer"}, Own(groups)
        groups = None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=own, model_parameters=groups, config=config
    )
    custom.preserve_state_dtypes(engine.optimizer.optimizer)
    return engine


def train(engine, step: int) -> float:
    """Take a step on a global batch that is the same for any world size; return its loss."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (ROWS, 5), generator=generator)
    mine = tokens[engine.global_rank :: engine.world_size]
    logits = engine(mine[:, :-1]).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    engine.module.seen += 1
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return float(total / engine.world_size)


def weights(engine) -> list[list[float]]:
    return (
        [group.tolist() for group in engine.optimizer.single_partition_of_fp32_groups]
        if (hasattr(engine.optimizer, "single_partition_of_fp32_groups"))
        else []
    )


def full_state(engine) -> dict:
    """Gather the complete training state. Every rank must call."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # DeepSpeed links them in a step
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    states = [state for state in engine.optimizer.optimizer.state.values() if state]
    keys = [key for key, value in states[0].items() if torch.is_tensor(value) and value.dim()]
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"{name}: master"] = safe_get_full_fp32_param(parameter)
            for key in keys:
                found[f"{name}: {key}"] = safe_get_full_optimizer_state(parameter, key)
        enabled = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], enabled=enabled):
            found[f"{name}: weight"] = parameter.detach().clone()
    found["steps"] = {float(state["step"]) for state in states}
    found["group states"] = [
        [group.get(key) for key in ("counted", "added")]
        for group in engine.optimizer.optimizer.param_groups
    ]
    found["decays"] = [state["decay"] for state in states if "decay" in state]
    found["dtypes"] = {key: states[0][key].dtype for key in keys}
    found["buffer"] = engine.module.seen.clone()
    found["counters"] = (engine.global_steps, engine.skipped_steps)
    if engine.lr_scheduler is not None:
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        found["scheduler"] = (engine.lr_scheduler.state_dict(), rates)
    return found


def run(job: dict) -> None:
    directory, tag = os.path.split(job["checkpoint"])
    engine = new_engine(job, seed=1 if job["do"] == "save" else 2)
    found = {"world_size": engine.world_size, "stage": engine.zero_optimization_stage()}
    if job["do"] == "save":
        found["losses"] = [train(engine, step) for step in range(STEPS)]
        engine.save_checkpoint(directory, tag=tag, save_latest=False)
    elif job["do"] == "native":
        engine.load_checkpoint(directory, tag=tag)
    elif job["do"] == "load":
        assert checkpoints.load(engine, Path(job["checkpoint"]))
    else:
        manifest = {"world_size": job["world_size"], "zero_stage": job["stage"]}
        before = weights(engine)
        try:
            reshard.load(engine, Path(job["checkpoint"]), manifest)
        except CheckpointError as error:
            found["refused"] = str(error)
            found["untouched"] = before == weights(engine) and engine.global_steps == 0
    if "refused" not in found:
        found |= full_state(engine)
    if job["do"] == "reshard" and "refused" not in found:
        engine.save_checkpoint(*os.path.split(job["again"]), save_latest=False)
    if job["do"] not in ("native", "load") and "refused" not in found:
        found["next loss"] = train(engine, STEPS)
        found["loss after"] = train(engine, STEPS + 1)
    if engine.global_rank == 0:
        torch.save(found, job["state"])
    engine.destroy()


def main(path: str) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.distributed.barrier()
    shared_memory.release()
    for job in json.loads(Path(path).read_text()):
        print("job", job["do"], job["state"], flush=True)
        run(job)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
