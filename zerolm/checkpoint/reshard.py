"""Load a checkpoint that was cut for other ranks, another ZeRO stage or another offload.

Each rank opens the shards that hold what it needs, maps them, copies those values into a state of
its own cut, and gives that to DeepSpeed's own loader, as if this topology had saved it. No rank
sees more than its share, nothing is converted on disk, and the values are copied, so they are equal
in every bit. The weights are then made from the float32 masters, as after every optimizer step.

pretrain.py hands the checkpoint across after its files were verified; topology.py says when this is
needed, partitions.py where each value lies. Works on the files of DeepSpeed 0.19, which are read as
data (unpickling.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerolm.checkpoint.partitions import Partitions
from zerolm.checkpoint.safe_load import read_data
from zerolm.checkpoint.zero_files import (
    MASTER,
    base_state,
    copied,
    group_states,
    masters,
    masters_key,
    model_file,
    optimizer_files,
    partitions,
)
from zerolm.common.errors import CheckpointError
from zerolm.distributed.collectives import gather_objects

# What two implementations of one optimizer call the same thing: torch's Adagrad, DeepSpeed's on CPU
RENAMED = {"Adagrad": {"exp_avg_sq": "sum"}, "DeepSpeedCPUAdagrad": {"sum": "exp_avg_sq"}}
OF_SCHEDULERS = ("lr", "betas", "momentum")  # what a scheduler of the ds config changes in a group


def load(engine: Any, directory: Path, manifest: Mapping[str, Any]) -> None:
    """Load weights, optimizer states and DeepSpeed's own counters. Every rank must call.

    Args:
        engine: fresh from `deepspeed.initialize`.
        directory: of the checkpoint; its files were compared with their checksums, and hold data
            only (`unpickling.problems_of`).
        manifest: its `world_size` and `zero_stage` are those that wrote it.

    Raises:
        CheckpointError: on every rank alike, before the engine is touched, for states that cannot
            be cut anew: file, key and reason of each.
    """
    path = model_file(directory, manifest)
    model_state = read_data(path, mapped=True)
    old = partitions(model_state["param_shapes"], manifest["world_size"], manifest["zero_stage"])
    stage = engine.zero_optimization_stage()
    new = partitions(engine._get_zero_param_shapes(), engine.world_size, stage)
    template = engine.optimizer.state_dict()
    files = optimizer_files(directory, manifest["world_size"])
    share = range(engine.global_rank, len(files), engine.world_size)
    seen = [_examine(files[rank], old, masters(template)[0].dtype) for rank in share]
    problems = _model_problems(path, model_state, old, new, template)
    problems += [problem for facts in seen for problem in facts["problems"]]
    facts = [shard for shards in gather_objects(seen) for shard in shards]
    problems = [line for lines in gather_objects(problems) for line in lines]
    problems += _contradictions(facts)
    if problems:
        raise CheckpointError(list(dict.fromkeys(problems)))

    dtypes = {MASTER: masters(template)[0].dtype, **facts[0]["dtypes"]}
    flats = copied(old, new, files, engine.global_rank, dtypes)
    _fill(template, flats, facts[0]["scalars"], engine.optimizer.optimizer)
    shard = read_data(files[0], mapped=True)["optimizer_state_dict"]
    _take_over(template, shard, scheduled=engine.lr_scheduler is not None)
    _give(engine, template)
    _restore_the_rest(engine, model_state)


# -------------------------------------------------------------------------------------------------
# What is there


def _examine(path: Path, cut: Partitions, master_dtype: torch.dtype) -> dict[str, Any]:
    """Return what a shard holds (`scalars`, `dtypes`), and what of it cannot be cut anew."""
    state = read_data(path, mapped=True)["optimizer_state_dict"]
    problems: list[str] = []
    scalars: dict[str, float] = {}
    dtypes: dict[str, torch.dtype] = {}
    facts = {"path": path, "problems": problems, "scalars": scalars, "dtypes": dtypes}
    if not isinstance(base_state(state), dict):
        problems.append(
            f"{path}: base_optimizer_state: written with zero_optimization.elastic_checkpoint. Go "
            f"on with the world size and ZeRO stage of the checkpoint."
        )
        return facts
    if any(padding for group in state.get("param_alignment_paddings", []) for padding in group):
        problems.append(
            f"{path}: param_alignment_paddings: written with zero_optimization.parameter_alignment"
            f", which cannot be cut anew. Go on with the topology of the checkpoint."
        )
        return facts
    states = group_states(state)
    assert len(states) == len(cut.sizes) == len(masters(state)), f"{path}: groups"
    for master, entries, size in zip(masters(state), states, cut.sizes, strict=True):
        # Stages 1 and 2 save masters without what fills them up; it only stands at the end.
        if master.numel() > size or master.dtype != master_dtype:
            problems.append(
                f"{path}: masters: {master.numel()} values of {master.dtype}, this run wants up to "
                f"{size} of {master_dtype}. Use the precision of the checkpoint's profile."
            )
        if set(entries) != set(states[0]):
            problems.append(
                f"{path}: state: {sorted(entries)} in one group, {sorted(states[0])} in another. "
                f"Go on with the topology of the checkpoint."
            )
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.numel() == size and value.dim() == 1:
                dtypes[key] = value.dtype
            elif isinstance(value, (int, float)) or (
                isinstance(value, torch.Tensor) and value.numel() == 1
            ):
                if scalars.setdefault(key, float(value)) != float(value):
                    problems.append(f"{path}: state.{key}: differs between parameters.")
            else:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
                problems.append(
                    f"{path}: state.{key}: {shape}, is neither a number nor one value a parameter "
                    f"({size} here). Go on with the topology of the checkpoint."
                )
    return facts


def _contradictions(facts: list[dict[str, Any]]) -> list[str]:
    """Find what tells the shards of a checkpoint apart, though it must be the same in all."""
    return [
        f"{shard['path']}: state: {key} is {shard[key]}, in {facts[0]['path']} it is "
        f"{facts[0][key]}. Resume from another checkpoint."
        for shard in facts[1:]
        for key in ("scalars", "dtypes")
        if shard[key] != facts[0][key]
    ]


def _model_problems(
    path: Path,
    model_state: dict[str, Any],
    old: Partitions,
    new: Partitions,
    template: dict[str, Any],
) -> list[str]:
    problems = []
    ours, theirs = new.parameters(), old.parameters()
    if ours != theirs:
        names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        problems.append(
            f"{path}: param_shapes: not this model's: {', '.join(names[:4])}. Use the "
            f"--model_config of the run."
        )
    if model_state.get("frozen_param_shapes"):
        problems.append(
            f"{path}: frozen_param_shapes: parameters without an optimizer state are not cut anew. "
            f"Go on with the topology of the checkpoint."
        )
    if any(padding for group in template.get("param_alignment_paddings", []) for padding in group):
        problems.append(
            "--deepspeed_config: zero_optimization.parameter_alignment: states cannot be cut anew "
            "for it. Remove the key, or go on with the topology of the checkpoint."
        )
    return problems


# -------------------------------------------------------------------------------------------------
# What this rank gets


def _fill(
    template: dict[str, Any],
    flats: list[dict[str, torch.Tensor]],
    scalars: dict[str, float],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Put this rank's parts into a fresh engine's state, as its optimizer would keep them."""
    # A new list: the template's may be the engine's own.
    template[masters_key(template)] = [flat.pop(MASTER) for flat in flats]
    if not scalars and not any(flats):
        return  # saved before the first optimizer step: the states of a fresh engine are right
    # torch's optimizers count steps in a tensor, DeepSpeed's in a number
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    renamed = RENAMED.get(type(optimizer).__name__, {})
    base = base_state(template)
    numbers = [number for group in base["param_groups"] for number in group["params"]]
    base["state"] = {
        number: {
            **{renamed.get(key, key): value for key, value in flat.items()},
            **{
                key: torch.tensor(value, dtype=torch.float32) if of_torch else int(value)
                for key, value in scalars.items()
            },
        }
        for number, flat in zip(numbers, flats, strict=True)
    }


def _take_over(template: dict[str, Any], shard: dict[str, Any], *, scheduled: bool) -> None:
    """Copy what is the same on all ranks: the loss scale, and what a scheduler has set."""
    if template.get("dynamic_loss_scale") and shard.get("dynamic_loss_scale"):
        template["loss_scaler"] = shard["loss_scaler"]
    groups, old = base_state(template)["param_groups"], base_state(shard)["param_groups"]
    if scheduled and len(groups) == len(old):
        for group, before in zip(groups, old, strict=True):
            group.update({key: before[key] for key in OF_SCHEDULERS if key in group})


def _give(engine: Any, state: dict[str, Any]) -> None:
    """Load a state of this rank's own cut into the engine, and make the weights from it."""
    optimizer, rank = engine.optimizer, engine.global_rank
    partitioned = engine.zero_optimization_stage() == 3
    if partitioned:
        optimizer.checkpoint_event_prologue()
    optimizer.load_state_dict(
        [None] * rank + [state], load_optimizer_states=True, load_from_fp32_weights=True
    )
    if partitioned:
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()


def _restore_the_rest(engine: Any, model_state: dict[str, Any]) -> None:
    """Restore DeepSpeed's counters, its scheduler, and the buffers that are part of the model."""
    engine.global_steps = model_state["global_steps"]
    engine.global_samples = model_state["global_samples"]
    engine.skipped_steps = model_state["skipped_steps"]
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(model_state["lr_scheduler"])
    buffers = dict(engine.module.named_buffers())
    for name in model_state["buffer_names"]:
        buffers[name].copy_(model_state["module"][name])
