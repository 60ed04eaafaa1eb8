"""The files in which DeepSpeed's ZeRO keeps weights and optimizer states, read without DeepSpeed.

A shard is what one rank saved: flat tensors, one for each group of parameters. What is read here is
data only (unpickling.py), mapped, so that only what is looked at comes into memory; where each
parameter's values lie is partitions.py's arithmetic. For the stages 1, 2 and 3 of DeepSpeed 0.19,
of any precision: stage 1 in bf16 with fp32 accumulation has a format of its own, which DeepSpeed's
own `zero_to_fp32` does not know.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zerolm.errors import CheckpointError
from zerolm.partitions import Partitions
from zerolm.unpickling import read_data

MASTER = "float32 master"  # beside the optimizer's own names, such as exp_avg


def model_file(directory: Path, manifest: Mapping[str, Any]) -> Path:
    """Return the file with the parameters' order and shapes, the buffers and the counters."""
    name = "zero_pp_rank_0_mp_rank_00" if manifest["zero_stage"] == 3 else "mp_rank_00"
    return directory / f"{name}_model_states.pt"


def optimizer_files(directory: Path, world_size: int) -> list[Path]:
    """Return the file of each rank's shard.

    Raises:
        CheckpointError: there are not as many as ranks.
    """
    pattern = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
    found = {
        int(match[1]): path for path in directory.iterdir() if (match := pattern.match(path.name))
    }
    if sorted(found) != list(range(world_size)):
        raise CheckpointError(
            f"{directory}: has optimizer states of ranks {sorted(found)}, its manifest says "
            f"{world_size} ranks. Resume from another checkpoint."
        )
    return [found[rank] for rank in range(world_size)]


def partitions(param_shapes: Any, world_size: int, stage: int) -> Partitions:
    """Return how parameters are cut.

    Args:
        param_shapes: {name: torch.Size} of each group, of a model file or an engine.
    """
    groups = [{name: shape.numel() for name, shape in group.items()} for group in param_shapes]
    return Partitions(groups, world_size, each=stage == 3)


def base_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the optimizer inside ZeRO's, in a shard or of an engine."""
    stage_3 = "optimizer_state_dict"
    return state[stage_3 if stage_3 in state else "base_optimizer_state"]


def masters_key(state: dict[str, Any]) -> str:
    """Return under which name the masters are: those of stages 1 and 2 may lack their filling."""
    return "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"


def masters(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the float32 masters of each group, in a shard or of an engine."""
    return state[masters_key(state)]


def group_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the optimizer's state of each group, in the order of the masters."""
    base = base_state(state)
    numbers = [number for group in base["param_groups"] for number in group["params"]]
    return [base["state"].get(number, {}) for number in numbers]


def copied(
    old: Partitions,
    new: Partitions,
    files: list[Path],
    rank: int,
    dtypes: dict[str, torch.dtype],
) -> list[dict[str, torch.Tensor]]:
    """Return a rank's part of each group: the masters, and each state that has their size.

    Args:
        old: how `files` are cut.
        new: how the result is.
        dtypes: of what is wanted: `MASTER`, and names of the optimizer's states.

    One shard is open at a time, and of it only the pages that are copied are in memory.
    """
    flats = [
        {key: torch.zeros(size, dtype=dtype) for key, dtype in dtypes.items()} for size in new.sizes
    ]
    for source_rank, copies in groupby(new.copies(rank, old), key=lambda copy: copy.source_rank):
        state = read_data(files[source_rank], mapped=True)["optimizer_state_dict"]
        sources = [
            {MASTER: master, **entries}
            for master, entries in zip(masters(state), group_states(state), strict=True)
        ]
        for copy in copies:
            for key in dtypes:
                values = sources[copy.source_group][key]
                values = values[copy.source_offset : copy.source_offset + copy.length]
                flats[copy.group][key][copy.offset : copy.offset + copy.length] = values
    return flats


def whole_weights(directory: Path, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the model's state dict: float32 masters, tied weights under each name, buffers.

    Args:
        directory: of a checkpoint whose files were compared with its manifest.
        manifest: that manifest.
    """
    world_size = manifest["world_size"]
    model_state = read_data(model_file(directory, manifest), mapped=True)
    shapes = {name: shape for group in model_state["param_shapes"] for name, shape in group.items()}
    old = partitions(model_state["param_shapes"], world_size, manifest["zero_stage"])
    one_each = Partitions([{name: shape.numel()} for name, shape in shapes.items()], 1, each=True)
    flats = copied(
        old, one_each, optimizer_files(directory, world_size), 0, {MASTER: torch.float32}
    )
    found = {
        name: flat[MASTER].view(shape)
        for flat, (name, shape) in zip(flats, shapes.items(), strict=True)
    }
    found |= {name: found[twin] for name, twin in model_state["shared_params"].items()}
    return found | {name: model_state["module"][name] for name in model_state["buffer_names"]}
