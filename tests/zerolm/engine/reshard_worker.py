"""One rank of test_reshard.py: trains and saves, or loads a checkpoint of another topology.

    RANK=0 WORLD_SIZE=2 ... python reshard_worker.py JOBS.json

Each job has a DeepSpeed config (`config`), the checkpoint's directory (`checkpoint`), and a file
(`state`) to which rank 0 writes the complete state of the engine, gathered by DeepSpeed's
`safe_get_full_*`. `do` is `save`, `reshard`, or `native` for DeepSpeed's own loading. A
resharded engine saves to `again` and takes further steps.
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
from zerolm.engine import reshard, shared_memory
from zerolm.optim.parameter_groups import parameter_groups

WORDS, WIDTH, STEPS, ROWS = 37, 9, 3, 12  # odd sizes, so that all parts have padding


class TinyModel(nn.Module):
    """A tied or untied model with odd shapes, and a buffer that is part of it."""

    def __init__(self, tied: bool):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, 13)
        self.norm = nn.LayerNorm(13)
        self.out = nn.Linear(13, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros(3))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.out(self.norm(self.hidden(self.embed(tokens)).relu())))


def new_engine(job: dict, seed: int):
    torch.manual_seed(seed)
    config = job["config"]
    bf16 = config.get("bf16", {}).get("enabled", False)
    model = TinyModel(job["tied"]).to(torch.bfloat16 if bf16 else torch.float32)
    groups = parameter_groups(model, 0.1)
    if config["optimizer"]["type"] == "Adagrad":  # ZeRO-3 rebuilds it with one group
        groups = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
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
        found[f"{name}: master"] = safe_get_full_fp32_param(parameter)
        for key in keys:
            found[f"{name}: {key}"] = safe_get_full_optimizer_state(parameter, key)
        enabled = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], enabled=enabled):
            found[f"{name}: weight"] = parameter.detach().clone()
    found["steps"] = {float(state["step"]) for state in states}
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
    if job["do"] != "native" and "refused" not in found:
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
