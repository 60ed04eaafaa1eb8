"""The files in which DeepSpeed's ZeRO keeps weights and optimizer states, read without DeepSpeed.

A shard is what one rank saved: flat tensors, one for each group of parameters. What is read here is
data only (unpickling.py), mapped, so that only what is looked at comes into memory; where each
parameter's values lie is partitions.py's arithmetic. For the stages 1, 2 and 3 of DeepSpeed 0.19,
of any precision: stage 1 in bf16 with fp32 accumulation has a format of its own, which DeepSpeed's
own `zero_to_fp32` does not know.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zerolm.checkpoint.partitions import Partitions
from zerolm.checkpoint.safe_load import read_data
from zerolm.common.errors import CheckpointError

MASTER = "float32 master"  # beside the optimizer's own names, such as exp_avg


def model_file(directory: Path, manifest: Mapping[str, Any], part: int = 0) -> Path:
    """Return the file with the parameters' order and shapes, the buffers and the counters.

    Args:
        part: of matrices that were cut over ranks (`parallel.Layout`).
    """
    name = f"mp_rank_{part:02d}"
    if manifest["zero_stage"] == 3:
        name = f"zero_pp_rank_0_{name}"
    return directory / f"{name}_model_states.pt"


def optimizer_files(directory: Path, world_size: int, part: int = 0) -> list[Path]:
    """Return the file of each rank's shard.

    Args:
        world_size: of those that have the same part.
        part: as above.

    Raises:
        CheckpointError: there are not as many as ranks.
    """
    pattern = re.compile(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{part:02d}_optim_states\.pt")
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


def open_shard(path: Path) -> dict[str, Any]:
    """Return the states in a rank's file, mapped: what is not looked at is not read."""
    return read_data(path, mapped=True)["optimizer_state_dict"]


def copied(
    old: Partitions,
    new: Partitions,
    files: Sequence[Path],
    rank: int,
    dtypes: dict[str, torch.dtype],
    open_file: Callable[[Path], dict[str, Any]] = open_shard,
) -> list[dict[str, torch.Tensor]]:
    """Return a rank's part of each group: the masters, and each state that has their size.

    Args:
        old: how `files` are cut.
        new: how the result is; may have some of the parameters only.
        dtypes: of what is wanted: `MASTER`, and names of the optimizer's states.
        open_file: `open_shard`, or one that keeps some of them open.

    One shard is open at a time, and of it only the pages that are copied are in memory.
    """
    flats = [
        {key: torch.zeros(size, dtype=dtype) for key, dtype in dtypes.items()} for size in new.sizes
    ]
    for source_rank, copies in groupby(new.copies(rank, old), key=lambda copy: copy.source_rank):
        state = open_file(files[source_rank])
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


class Weights:
    """The model of a checkpoint, one tensor at a time: float32 masters, and buffers.

    Args:
        directory: of a checkpoint whose files were compared with its manifest.
        manifest: that manifest.
        part: 0, or another one of matrices that were cut over ranks: the first puts them together.

    Attributes:
        shapes: {name: torch.Size} of the parameters, each one once.
        twins: {other name: name} of tied parameters.
        buffers: names of what is kept beside the parameters.

    Raises:
        CheckpointError: there are not as many shards as ranks.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any], part: int = 0):
        parts = manifest.get("cut", {}).get("tensor_parallel", 1)
        world_size, stage = manifest["world_size"] // parts, manifest["zero_stage"]
        self._model_state = read_data(model_file(directory, manifest, part), mapped=True)
        groups = self._model_state["param_shapes"]
        self.shapes = {name: shape for group in groups for name, shape in group.items()}
        self.twins: dict[str, str] = dict(self._model_state["shared_params"])
        self.buffers: list[str] = list(self._model_state["buffer_names"])
        self._cut = partitions(groups, world_size, stage)
        self._files = optimizer_files(directory, world_size, part)
        self._open: dict[Path, dict[str, Any]] = {}
        others = range(1, parts) if part == 0 else ()
        self._others = [Weights(directory, manifest, other) for other in others]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor under any of its names; of the others nothing comes into memory."""
        name = self.twins.get(name, name)
        if name not in self.shapes:
            return self._model_state["module"][name]
        own = self._part(name)
        dim = self._cut_along(name) if self._others else None
        return own if dim is None else torch.cat([own, *(o._part(name) for o in self._others)], dim)

    def _cut_along(self, name: str) -> int | None:
        """Return the dimension along which ranks have parts of a parameter, None if all have it."""
        about = self._model_state["universal_checkpoint_info"]
        if f"^{re.escape(name)}$" in about["tp_replicated_parameter_patterns"]:
            return None
        rows = about["parameter_with_row_parallelism_patterns"]
        return 1 if f"^{re.escape(name)}$" in rows else 0

    def _part(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        alone = Partitions([{name: shape.numel()}], 1, each=True)
        [flat] = copied(self._cut, alone, self._files, 0, {MASTER: torch.float32}, self._open_once)
        return flat[MASTER].view(shape)

    def release(self) -> None:
        """Unmap the shards: what was read of them need not stay in memory."""
        self._open.clear()
        for other in self._others:
            other.release()

    def _open_once(self, path: Path) -> dict[str, Any]:
        if path not in self._open:
            self._open[path] = open_shard(path)
        return self._open[path]
