"""Read DeepSpeed's ZeRO checkpoint files without DeepSpeed.

A shard is the file that contains one rank's optimizer states, with a flat tensor for each parameter
group. Files are read with `safe_load.read_data` and memory-mapped, so only the values in use are
loaded. `Partitions` computes where each parameter's values are. Supports stages 1, 2 and 3 of
DeepSpeed 0.19 in any precision, including stage 1 in bf16 with fp32 accumulation, whose format
DeepSpeed's `zero_to_fp32` cannot read.
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

MASTER = "float32 master"  # used alongside the optimizer's own names, such as exp_avg


def model_file(
    directory: Path, manifest: Mapping[str, Any], tensor_rank: int = 0, rank: int = 0
) -> Path:
    """Return the path of the file with the parameters' order and shapes, the buffers and the
    counters.

    Args:
        tensor_rank: rank within a tensor-parallel group.
        rank: used only at stage 3, where the file contains this rank's part of frozen parameters.
    """
    name = f"mp_rank_{tensor_rank:02d}"
    if manifest["zero_stage"] == 3:
        name = f"zero_pp_rank_{rank}_{name}"
    return directory / f"{name}_model_states.pt"


def optimizer_files(directory: Path, num_shards: int, tensor_rank: int = 0) -> list[Path]:
    """Return the paths of one tensor-parallel rank's shards, ordered by rank."""
    pattern = re.compile(
        rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{tensor_rank:02d}_optim_states\.pt"
    )
    found = {
        int(match[1]): path for path in directory.iterdir() if (match := pattern.match(path.name))
    }
    if sorted(found) != list(range(num_shards)):
        raise CheckpointError(
            f"{directory}: contains optimizer states for ranks {sorted(found)}, but its manifest "
            f"lists {num_shards} ranks. Resume from another checkpoint."
        )
    return [found[rank] for rank in range(num_shards)]


def partitions(param_shapes: Any, num_shards: int, stage: int) -> Partitions:
    """Return the layout of the parameters over the ranks that share them.

    Args:
        param_shapes: {name: torch.Size} for each group, from a model file or an engine.
    """
    groups = [{name: shape.numel() for name, shape in group.items()} for group in param_shapes]
    return Partitions(groups, num_shards, per_parameter=stage == 3)


def base_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the wrapped optimizer's state dict from the state dict of a shard or engine."""
    stage_3 = "optimizer_state_dict"
    return state[stage_3 if stage_3 in state else "base_optimizer_state"]


def masters_key(state: dict[str, Any]) -> str:
    """Return the key under which a state dict stores the master weights. At stages 1 and 2, their
    padding may be missing.
    """
    return "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"


def masters(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return each group's float32 master weights from the state dict of a shard or engine."""
    return state[masters_key(state)]


def group_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each group's optimizer states, in the order of the master weights."""
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
    """Return a rank's master weights and optimizer states for each group, in a new layout.

    One shard is open at a time, and only the pages that are copied are loaded.

    Args:
        old: layout of `files`.
        new: layout of the result, which may include only some of the parameters.
        files: the shards, by rank.
        dtypes: {name: dtype} for each tensor to return: `MASTER` and optimizer states.
        open_file: opens a shard, and may keep it open for later calls.
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
                    raise ValueError(
                        f"{files[source_rank].name}: contains {found}, not {copy.length}"
                    )
                flats[copy.group][key][copy.offset : copy.offset + copy.length] = values
    return flats


class Weights:
    """The weights of a verified checkpoint, loaded one at a time: float32 masters and buffers.

    Args:
        tensor_rank: rank within a tensor-parallel group. With tensor parallelism, rank 0 returns
            complete matrices joined from all ranks' parts; other ranks return their own part.
        state: `MASTER`, or the optimizer state to return in place of the masters.

    Attributes:
        converts: False, since names and shapes match the model's code.
        shapes: {name: torch.Size} of the parameters; tied parameters appear once.
        tied: {other name: name in `shapes`} of tied parameters.
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
        """{name: shape and dtype} of buffers and complete parameters; tied ones appear once."""
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
        """Return a parameter or buffer by any of its names, without loading any other tensor.

        Raises:
            CheckpointError: the files lack the tensor, or contain a tensor with another size.
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
        """Return a frozen parameter, joined from the parts that the ranks save at stage 3."""
        states = [read_data(path, mapped=True) for path in self._model_files]
        parts = [state["frozen_param_fragments"][name].flatten() for state in states]
        shape = self._frozen[name]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def _sharded_dim(self, name: str) -> int | None:
        """Return the dimension along which tensor parallelism shards a parameter; None if it is not
        sharded.
        """
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
        """Close the shards so that the kernel can evict their mapped pages."""
        self._open.clear()
        for other in self._others:
            other.release()

    def _open_once(self, path: Path) -> dict[str, Any]:
        if path not in self._open:
            self._open[path] = open_shard(path)
        return self._open[path]
