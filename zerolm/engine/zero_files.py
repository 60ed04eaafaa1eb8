"""Read the checkpoint files of DeepSpeed's ZeRO, without DeepSpeed.

A shard is the file of one rank's optimizer states: flat tensors, one for each parameter group.
Files are read with `safe_load.read_data` and memory-mapped, so only values that are used are
loaded. `Partitions` computes where each parameter's values are. Supports stages 1, 2 and 3 of
DeepSpeed 0.19 in any precision, also stage 1 in bf16 with fp32 accumulation, which has its own
format that DeepSpeed's `zero_to_fp32` cannot read.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zerolm.common.errors import CheckpointError
from zerolm.common.values import Tensor
from zerolm.engine.partitions import Partitions, num_shards
from zerolm.engine.safe_load import interpreted, read_data

MASTER = "float32 master"  # besides the optimizer's own names, such as exp_avg


def model_file(
    directory: Path, manifest: Mapping[str, Any], tensor_rank: int = 0, rank: int = 0
) -> Path:
    """Return the file with the parameters' order and shapes, the buffers and the counters.

    Args:
        tensor_rank: rank within a tensor-parallel group.
        rank: used at stage 3 only, where each file has its rank's part of frozen parameters.
    """
    name = f"mp_rank_{tensor_rank:02d}"
    if manifest["zero_stage"] == 3:
        name = f"zero_pp_rank_{rank}_{name}"
    return directory / f"{name}_model_states.pt"


def optimizer_files(directory: Path, num_shards: int, tensor_rank: int = 0) -> list[Path]:
    """Return the shards of one tensor-parallel rank, in the order of ranks."""
    pattern = re.compile(
        rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{tensor_rank:02d}_optim_states\.pt"
    )
    found = {
        int(match[1]): path for path in directory.iterdir() if (match := pattern.match(path.name))
    }
    if sorted(found) != list(range(num_shards)):
        raise CheckpointError(
            f"{directory}: has optimizer states of ranks {sorted(found)}, but its manifest says "
            f"{num_shards} ranks. Resume from another checkpoint."
        )
    return [found[rank] for rank in range(num_shards)]


def partitions(param_shapes: Any, num_shards: int, stage: int) -> Partitions:
    """Return the layout of the parameters over the ranks that share them.

    Args:
        param_shapes: {name: torch.Size} of each group, from a model file or an engine.
    """
    groups = [{name: shape.numel() for name, shape in group.items()} for group in param_shapes]
    return Partitions(groups, num_shards, per_parameter=stage == 3)


def base_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of the optimizer that ZeRO wraps, from that of a shard or engine."""
    stage_3 = "optimizer_state_dict"
    return state[stage_3 if stage_3 in state else "base_optimizer_state"]


def masters_key(state: dict[str, Any]) -> str:
    """Return the key of the masters. Under that of stages 1 and 2 they may lack their padding."""
    return "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"


def masters(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the float32 masters of each group, from the state dict of a shard or engine."""
    return state[masters_key(state)]


def group_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the optimizer's states of each group, in the order of the masters."""
    base = base_state(state)
    numbers = [number for group in base["param_groups"] for number in group["params"]]
    return [base["state"].get(number, {}) for number in numbers]


def open_shard(path: Path) -> dict[str, Any]:
    """Return the state dict of a shard, memory-mapped."""
    return read_data(path, mapped=True)["optimizer_state_dict"]


def copy_partitions(
    old: Partitions,
    new: Partitions,
    files: Sequence[Path],
    rank: int,
    dtypes: dict[str, torch.dtype],
    open_file: Callable[[Path], dict[str, Any]] = open_shard,
) -> list[dict[str, torch.Tensor]]:
    """Return a rank's part of each group: masters and optimizer states, in a new layout.

    One shard is open at a time, and only its pages that are copied are loaded.

    Args:
        old: layout of `files`.
        new: layout of the result, which may have only some of the parameters.
        files: the shards, by rank.
        dtypes: {name: dtype} of the tensors to return: `MASTER` and states of the optimizer.
        open_file: opens a shard; may keep it open for later calls.
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
                if len(values) != copy.length or not values.is_floating_point():
                    found = f"{len(values)} values of {values.dtype}"
                    raise ValueError(f"{files[source_rank].name}: has {found}, not {copy.length}")
                flats[copy.group][key][copy.offset : copy.offset + copy.length] = values
    return flats


class Weights:
    """The weights of a verified checkpoint, loaded one at a time: float32 masters, and buffers.

    Args:
        tensor_rank: rank within a tensor-parallel group. Rank 0 returns complete matrices, joined
            from those of all ranks; others return their own part.
        state: `MASTER`, or the state of the optimizer to return in place of the masters.

    Attributes:
        converts: False: names and shapes are those of the model's code.
        shapes: {name: torch.Size} of the parameters; tied ones have one name.
        tied: {other name: name} of tied parameters.
        buffers: names of the buffers.

    Raises:
        CheckpointError: a shard is missing, or there are too many.
    """

    converts = False

    def __init__(
        self,
        directory: Path,
        manifest: Mapping[str, Any],
        tensor_rank: int = 0,
        state: str = MASTER,
    ):
        self._state, self._directory = state, directory
        with interpreted(directory):
            self._read(directory, manifest, tensor_rank)

    def _read(self, directory: Path, manifest: Mapping[str, Any], tensor_rank: int) -> None:
        degree = manifest.get("cut", {}).get("tensor_parallel", 1)
        shards, stage = num_shards(manifest) // degree, manifest["zero_stage"]
        self._model_state = read_data(model_file(directory, manifest, tensor_rank), mapped=True)
        groups = self._model_state["param_shapes"]
        self.shapes = {name: shape for group in groups for name, shape in group.items()}
        self.tied: dict[str, str] = dict(self._model_state["shared_params"])
        self.buffers: list[str] = list(self._model_state["buffer_names"])
        self._layout = partitions(groups, shards, stage)
        self._frozen = self._model_state.get("frozen_param_shapes") or {}
        self._model_files = [
            model_file(directory, manifest, tensor_rank, rank)
            for rank in range(shards if stage == 3 else 1)
        ]
        self._files = optimizer_files(directory, shards, tensor_rank)
        self._open: dict[Path, dict[str, Any]] = {}
        others = range(1, degree) if tensor_rank == 0 else ()
        self._others = [Weights(directory, manifest, other, self._state) for other in others]

    @cached_property
    def listed(self) -> dict[str, Tensor]:
        """{name: shape and dtype} of parameters, complete and tied ones once, and of buffers."""
        with interpreted(self._directory):
            listed = {name: self._full_shape(name) for name in self.shapes} | self._frozen
            listed |= {name: self._model_state["module"][name].shape for name in self.buffers}
            return {
                name: Tensor(tuple(shape), str(self._dtype(name)).removeprefix("torch."))
                for name, shape in listed.items()
            }

    def _dtype(self, name: str) -> torch.dtype:
        is_master = name in self.shapes
        return torch.float32 if is_master else self._model_state["module"][name].dtype

    def _full_shape(self, name: str) -> tuple[int, ...]:
        shape = list(self.shapes[name])
        dim = self._sharded_dim(name) if self._others else None
        if dim is not None:
            shape[dim] += sum(other.shapes[name][dim] for other in self._others)
        return tuple(shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer by any of its names, without loading any other.

        Raises:
            CheckpointError: the files do not have it, or have no tensor of its size.
        """
        with interpreted(self._directory):
            return self._tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        name = self.tied.get(name, name)
        if name in self._frozen:
            return self._frozen_parameter(name)
        if name not in self.shapes:
            return self._model_state["module"][name].detach()
        own = self._part(name)
        dim = self._sharded_dim(name) if self._others else None
        return own if dim is None else torch.cat([own, *(o._part(name) for o in self._others)], dim)

    def _frozen_parameter(self, name: str) -> torch.Tensor:
        """Return a parameter that is not trained: stage 3 saves a part of it for each rank."""
        states = [read_data(path, mapped=True) for path in self._model_files]
        parts = [state["frozen_param_fragments"][name].flatten() for state in states]
        shape = self._frozen[name]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def _sharded_dim(self, name: str) -> int | None:
        """Return the dimension along which tensor parallelism shards a parameter, None if none."""
        info = self._model_state["universal_checkpoint_info"]
        if f"^{re.escape(name)}$" in info["tp_replicated_parameter_patterns"]:
            return None
        rows = info["parameter_with_row_parallelism_patterns"]
        return 1 if f"^{re.escape(name)}$" in rows else 0

    def _part(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        alone = Partitions([{name: shape.numel()}], 1, per_parameter=True)
        dtypes = {self._state: torch.float32}
        [flat] = copy_partitions(self._layout, alone, self._files, 0, dtypes, self._open_once)
        return flat[self._state].view(shape)

    def release(self) -> None:
        """Close the shards, so that their mapped pages can leave memory."""
        self._open.clear()
        for other in self._others:
            other.release()

    def _open_once(self, path: Path) -> dict[str, Any]:
        if path not in self._open:
            self._open[path] = open_shard(path)
        return self._open[path]
