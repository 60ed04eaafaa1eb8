"""Read DeepSpeed's ZeRO checkpoint files without DeepSpeed.

A shard is the file that contains one rank's optimizer states, with a flat tensor for each parameter
group. Files are read with `safe_load.read_data` and memory-mapped, so only the values in use are
loaded. `pieces_of` is the only reader of the files' names that says which parameter's values are in
which file; `Pieces` computes where in it. Supports stages 1, 2 and 3 of
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
from zerolm.ds_files.pieces import Pieces, num_shards, num_stages, tensor_degree
from zerolm.ds_files.safe_load import interpreted, read_data
from zerolm.engine.experts import EXPERTS
from zerolm.engine.stages import STAGE

# Files that, on the same topology, are read only by the rank that wrote them.
OF_ONE_RANK = re.compile(r"(bf16_)?zero_pp_rank_|offloaded_tensors/")
MASTER = "float32 master"  # used alongside the optimizer's own names, such as exp_avg


def model_file(directory: Path, manifest: Mapping[str, Any], part: int = 0, rank: int = 0) -> Path:
    """Return the path of the file with the parameters' order and shapes, the buffers and the
    counters.

    Args:
        part: rank within a tensor-parallel group, or the pipeline stage.
        rank: used only at stage 3, where the file contains this rank's part of frozen parameters.
    """
    name = f"mp_rank_{part:02d}"
    if manifest["zero_stage"] == 3:
        name = f"zero_pp_rank_{rank}_{name}"
    return directory / f"{name}_model_states.pt"


def read_models(directory: Path, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the contents of the model files by tensor-parallel rank or pipeline stage,
    memory-mapped.
    """
    parts = range(tensor_degree(manifest) * num_stages(manifest))
    return [read_data(model_file(directory, manifest, part), mapped=True) for part in parts]


def optimizer_files(directory: Path, num_shards: int, part: int = 0) -> list[Path]:
    """Return the paths of the shards of a tensor-parallel rank or pipeline stage, by rank."""
    pattern = re.compile(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{part:02d}_optim_states\.pt")
    found = {
        int(match[1]): path for path in directory.iterdir() if (match := pattern.match(path.name))
    }
    if sorted(found) != list(range(num_shards)):
        raise CheckpointError(
            f"{directory}: contains optimizer states for ranks {sorted(found)}, but its manifest "
            f"lists {num_shards} ranks. Resume from another checkpoint."
        )
    return [found[rank] for rank in range(num_shards)]


def of_all_stages(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content that the model file of a complete model would have, but for its groups of
    parameters.

    Args:
        models: the result of `read_models`.
    """
    joined = dict(models[0])
    for model in models[1:]:
        joined["module"] = {**model["module"], **joined["module"]}
        joined["shared_params"] = {**joined["shared_params"], **model["shared_params"]}
        degree, experts = divided_experts(joined)
        other, more = divided_experts(model)
        joined[EXPERTS] = {"degree": max(degree, other), "parameters": [*experts | more]}
        known = set(joined["buffer_names"])
        new = [name for name in model["buffer_names"] if name not in known]
        joined["buffer_names"] = [*joined["buffer_names"], *new]
    return joined


def num_values(param_shapes: Any) -> list[dict[str, int]]:
    """Return {name: number of values} for each group.

    Args:
        param_shapes: {name: torch.Size} for each group, from a model file or an engine.
    """
    return [{name: shape.numel() for name, shape in group.items()} for group in param_shapes]


def pieces_of(
    directory: Path, manifest: Mapping[str, Any], models: Sequence[Mapping[str, Any]]
) -> Pieces:
    """Return where each parameter's values are in a checkpoint's shards.

    Args:
        models: the result of `read_models`. Shards of a matrix follow each other, as if along its
            first dimension. Of a matrix that two pipeline stages share, the first counts.

    Raises:
        CheckpointError: a shard is missing, or there are too many.
    """
    found, shards = Pieces(), num_shards(manifest) // len(models)
    sharded = {name for name, blocks in blocks_of(models).items() if len(blocks) > 1}
    for part, model in enumerate(models):
        degree, experts = divided_experts(model)
        files = optimizer_files(directory, shards, part)
        for group in num_values(model["param_shapes"]):
            for number in range(degree) if experts & group.keys() else [None]:
                own = files if number is None else files[number::degree]
                found.add([group], own, manifest["zero_stage"] == 3, sharded)
    return found


def divided_experts(model: Mapping[str, Any]) -> tuple[int, set[str]]:
    """Return over how many neighbouring ranks experts are divided, and the names of the parameters
    that are, along their first dimension.

    Args:
        model: the content of a model file, which has the shapes of a rank's slices.
    """
    about = model.get(EXPERTS, {"degree": 1, "parameters": []})
    return about["degree"], {*about["parameters"]}


def blocks_of(models: Sequence[Mapping[str, Any]]) -> dict[str, list[torch.Size]]:
    """Return the shapes of each parameter's slices by tensor-parallel or expert-parallel rank, or
    its own shape if the ranks have copies.
    """
    found: dict[str, list[torch.Size]] = {}
    in_stages = STAGE in models[0]
    for number, model in enumerate(models):
        degree, experts = divided_experts(model)
        for name, shape in (item for group in model["param_shapes"] for item in group.items()):
            if name in experts:
                found[name] = [shape] * degree
            elif in_stages:
                found[name] = [shape]
            elif number == 0 or sharded_dim(model, name) is not None:
                found.setdefault(name, []).append(shape)
    return found


def sharded_dim(model: Mapping[str, Any], name: str) -> int | None:
    """Return the dimension along which a parameter is divided over ranks at every ZeRO stage; None
    if it is complete.

    Args:
        model: the content of a model file.
    """
    if name in divided_experts(model)[1]:
        return 0
    info = model["universal_checkpoint_info"]
    if f"^{re.escape(name)}$" in info["tp_replicated_parameter_patterns"]:
        return None
    rows = info["parameter_with_row_parallelism_patterns"]
    return 1 if f"^{re.escape(name)}$" in rows else 0


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


def copy_pieces(
    old: Pieces,
    new: Pieces,
    rank: int,
    dtypes: dict[str, torch.dtype],
    open_file: Callable[[Path], dict[str, Any]] = open_shard,
) -> list[dict[str, torch.Tensor]]:
    """Return a rank's master weights and optimizer states for each group, in a new layout.

    One shard is open at a time, and only the pages that are copied are loaded.

    Args:
        old: pieces in the shards of a checkpoint.
        new: pieces on ranks, which may include only some of the parameters.
        dtypes: {name: dtype} for each tensor to return: `MASTER` and optimizer states.
        open_file: opens a shard, and may keep it open for later calls.
    """
    flats = [
        {key: torch.zeros(size, dtype=dtype) for key, dtype in dtypes.items()}
        for size in new.sizes[rank]
    ]
    for path, copies in groupby(new.copies(rank, old), key=lambda copy: copy.piece.file):
        state = open_file(path)
        sources = [
            {MASTER: master, **entries}
            for master, entries in zip(masters(state), group_states(state), strict=True)
        ]
        for piece, group, offset in copies:
            for key in dtypes:
                values = sources[piece.group][key]
                values = values[piece.offset : piece.offset + piece.length]
                is_valid = values.is_floating_point() or values.dtype == dtypes[key]
                if len(values) != piece.length or not is_valid:
                    found = f"{len(values)} values of {values.dtype}"
                    raise ValueError(f"{path.name}: contains {found}, not {piece.length}")
                flats[group][key][offset : offset + piece.length] = values
    return flats


def _frozen_shapes(model_state: dict[str, Any]) -> dict[str, torch.Size]:
    """Return {name: shape} of the frozen parameters in a file of complete weights; DeepSpeed lists
    none at stage 1, and of a pipeline stage no other names of trained ones.
    """
    module = model_state["module"]
    known = {name for group in model_state["param_shapes"] for name in group}
    known |= {*model_state["buffer_names"], *model_state["shared_params"]}
    places = {module[name].data_ptr() for name in known & module.keys()}
    return {
        name: value.shape
        for name, value in module.items()
        if name not in known and value.data_ptr() not in places
    }


class Weights:
    """The weights of a verified checkpoint, loaded one at a time: float32 masters and buffers.

    Args:
        state: `MASTER`, or the optimizer state to return in place of the masters.

    Attributes:
        converts: False, since names and shapes match the model's code.
        shapes: {name: torch.Size} of the parameters; tied parameters appear once.
        tied: {other name: name in `shapes`} of tied parameters.
        buffers: names of the buffers.
        frozen: names of the parameters without optimizer states.

    Raises:
        CheckpointError: a shard is missing, or there are too many.
    """

    converts = False

    def __init__(self, directory: Path, manifest: Mapping[str, Any], state: str = MASTER):
        self._state, self._directory = state, directory
        self._open: dict[Path, dict[str, Any]] = {}
        with interpreted(directory):
            self._read(directory, manifest)

    def _read(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        models = read_models(directory, manifest)
        self._model_state = models[0]
        if STAGE in models[0]:
            self._model_state = of_all_stages(models)
        self._pieces = pieces_of(directory, manifest, models)
        self._blocks = blocks_of(models)
        self.shapes = {
            name: self._joined(name, [torch.empty(block, device="meta") for block in blocks]).shape
            for name, blocks in self._blocks.items()
        }
        self.tied: dict[str, str] = dict(self._model_state["shared_params"])
        self.buffers: list[str] = list(self._model_state["buffer_names"])
        self._frozen = dict(self._model_state.get("frozen_param_shapes") or {})
        self._is_partitioned = manifest["zero_stage"] == 3
        if not self._is_partitioned:
            for model in models:
                self._frozen |= _frozen_shapes(model)
        self.frozen = self._frozen.keys()
        self._model_files = [
            model_file(directory, manifest, rank=rank) for rank in range(num_shards(manifest))
        ]

    @cached_property
    def listed(self) -> dict[str, Tensor]:
        """{name: shape and dtype} of buffers and complete parameters; tied ones appear once."""
        with interpreted(self._directory):
            listed = self.shapes | self._frozen
            listed |= {name: self._model_state["module"][name].shape for name in self.buffers}
            return {
                name: Tensor(tuple(shape), str(self._dtype(name)).removeprefix("torch."))
                for name, shape in listed.items()
            }

    def _dtype(self, name: str) -> torch.dtype:
        is_master = name in self.shapes
        return torch.float32 if is_master else self._model_state["module"][name].dtype

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
        blocks = self._blocks[name]
        parts = self._values(name).split([block.numel() for block in blocks])
        return self._joined(
            name, [part.view(block) for part, block in zip(parts, blocks, strict=True)]
        )

    def _joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a parameter from its parts by tensor-parallel or expert-parallel rank."""
        dim = sharded_dim(self._model_state, name) if len(parts) > 1 else None
        return parts[0] if dim is None else torch.cat([*parts], dim)

    def _frozen_parameter(self, name: str) -> torch.Tensor:
        """Return a frozen parameter, joined from the parts that the ranks save at stage 3."""
        if not self._is_partitioned:
            return self._model_state["module"][name].detach()
        states = [read_data(path, mapped=True) for path in self._model_files]
        parts = [state["frozen_param_fragments"][name].flatten() for state in states]
        shape = self._frozen[name]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def _values(self, name: str) -> torch.Tensor:
        """Return the values of a parameter, the slice of one rank after that of another."""
        size = sum(block.numel() for block in self._blocks[name])
        alone = Pieces().add([{name: size}], range(1), per_parameter=True)
        dtypes = {self._state: torch.float32}
        [flat] = copy_pieces(self._pieces, alone, 0, dtypes, self._open_once)
        return flat[self._state]

    def release(self) -> None:
        """Close the shards so that the kernel can evict their mapped pages."""
        self._open.clear()

    def _open_once(self, path: Path) -> dict[str, Any]:
        if path not in self._open:
            self._open[path] = open_shard(path)
        return self._open[path]
