"""Load a ZeRO checkpoint that was written with another topology.

World size, ZeRO stage (1, 2, 3), pipeline stages, `--shard_within`, offload of optimizer states to
CPU and `sub_group_size` may differ. These checkpoints cannot be resharded: tensor-parallel ones;
those with Muon or states on NVMe; those written with `elastic_checkpoint` or `parameter_alignment`;
and those with another model, optimizer type or master precision. This module or
`zerolm.ds_config.topology.problems` refuses them.

Each rank memory-maps the shards that contain its values, copies these values into the current
topology's layout, and passes the result to DeepSpeed's own loader, as if the current topology had
saved it. No rank reads more than it needs, and nothing is converted on disk. Master weights and
moments are copied exactly; the model's weights are recomputed from the float32 master weights, as
after an optimizer step. Frozen parameters have no states; they are copied.

`Pieces` contains the arithmetic, and zerolm/ds_files/zero_files.py handles the file format
(DeepSpeed 0.19). The files must already be verified.
"""

import copy
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from zerolm.common.errors import CheckpointError
from zerolm.ds_files.pieces import Pieces
from zerolm.ds_files.safe_load import interpreted, read_data
from zerolm.ds_files.zero_files import (
    MASTER,
    Weights,
    base_state,
    copy_pieces,
    group_states,
    masters,
    masters_key,
    model_file,
    num_values,
    of_all_stages,
    pieces_of,
    read_models,
)
from zerolm.engine.parameters import divided_among, gathered, is_partitioned
from zerolm.engine.stages import groups_of
from zerolm.engine.states import data_parallel_group, update_weights

# Torch and DeepSpeed name the same state differently; keyed by the class that loads it.
RENAMED_STATES = {"Adagrad": {"exp_avg_sq": "sum"}, "DeepSpeedCPUAdagrad": {"sum": "exp_avg_sq"}}
SCHEDULED_KEYS = ("lr", "betas", "momentum")  # keys of a param group that a scheduler may change
SAME_TOPOLOGY = "Resume with the topology of the checkpoint."


def load(engine: Any, directory: Path, manifest: Mapping[str, Any]) -> None:
    """Load weights, optimizer states and DeepSpeed's counters. Every rank must call this.

    Args:
        engine: fresh from `deepspeed.initialize`.
        directory: a verified checkpoint that `safe_load.pickle_problems` has also checked.
        manifest: its keys `zero_stage` and `shards` or `world_size` determine the files' layout.

    Raises:
        CheckpointError: some states cannot be resharded; lists the file, key and reason of each.
            Raised on every rank, before the engine is modified.
    """
    path = model_file(directory, manifest)
    new = pieces_on_ranks(engine)
    ours = _of_all_stages(new.parameters(), engine.optimizer)
    template = engine.optimizer.state_dict()
    inspected: list[dict[str, Any]] = []
    try:
        with interpreted(directory):
            models = read_models(directory, manifest)
            model_state = of_all_stages(models)
            old = pieces_of(directory, manifest, models)
            files, dtype = list(old.sizes), masters(template)[0].dtype
            share = files[engine.global_rank :: engine.world_size]
            inspected = [_inspect_shard(path, old.sizes[path], dtype) for path in share]
            problems = _model_problems(path, model_state, old.parameters(), ours, template)
        problems += [problem for shard in inspected for problem in shard["problems"]]
    except CheckpointError as error:  # all ranks must raise the error
        problems = error.problems
    of_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, (inspected, problems))
    found = [shard for shards, _ in of_ranks for shard in shards]
    problems = [line for _, lines in of_ranks for line in lines] + _shard_differences(found)
    if problems:
        raise CheckpointError(list(dict.fromkeys(problems)))

    dtypes = {MASTER: masters(template)[0].dtype, **found[0]["dtypes"]}
    with interpreted(directory):
        flats = copy_pieces(old, new, engine.global_rank, dtypes)
        _set_rank_state(template, flats, found[0]["scalars"], engine.optimizer.optimizer)
        shard = read_data(files[0], mapped=True)["optimizer_state_dict"]
        _copy_shared_state(template, shard, scheduled=engine.lr_scheduler is not None)
        if _library(engine.optimizer.optimizer) not in ("torch", "deepspeed"):
            _copy_group_states(template, shard, engine.optimizer.optimizer)
        _load_into_engine(engine, template)
        _restore_counters(engine, model_state)
    _restore_frozen(engine, Weights(directory, manifest))


def pieces_on_ranks(engine: Any) -> Pieces:
    """Return where the values of each parameter are among the states of this copy's ranks."""
    found, in_parts = Pieces(), engine.zero_optimization_stage() == 3
    for number, group in enumerate(num_values(engine._get_zero_param_shapes())):
        ranks = distributed.get_process_group_ranks(data_parallel_group(engine, number))
        neighbours = divided_among(engine.module.get_parameter(next(iter(group))))
        sets = [ranks]
        if neighbours is not None:  # each has such a set of ranks
            first = distributed.get_rank(neighbours)
            size = distributed.get_world_size(neighbours)
            sets = [[rank - first + other for rank in ranks] for other in range(size)]
        for each in sets:
            found.add([group], each, in_parts, joined=group)
    return found


def _of_all_stages(sizes: dict[str, int], optimizer: Any) -> dict[str, int]:
    """Return the sizes of the parameters of all pipeline stages. Every rank must call this."""
    if groups_of(optimizer) is None:
        return sizes
    of_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, sizes)
    return {name: size for of_rank in of_ranks for name, size in of_rank.items()}


# -------------------------------------------------------------------------------------------------
# Check the checkpoint


def _inspect_shard(path: Path, sizes: list[int], master_dtype: torch.dtype) -> dict[str, Any]:
    """Return a dictionary with the `scalars` and `dtypes` of a shard's states, and the `problems`
    that prevent resharding.

    Args:
        sizes: number of values in the shard's part of each group.
    """
    state = read_data(path, mapped=True)["optimizer_state_dict"]
    problems: list[str] = []
    scalars: dict[str, Any] = {}
    dtypes: dict[str, torch.dtype] = {}
    facts = {"path": path, "problems": problems, "scalars": scalars, "dtypes": dtypes}
    if not isinstance(base_state(state), dict):
        problems.append(
            f"{path}: base_optimizer_state: written with zero_optimization.elastic_checkpoint, "
            f"which cannot be resharded. {SAME_TOPOLOGY}"
        )
        return facts
    if any(padding for group in state.get("param_alignment_paddings", []) for padding in group):
        problems.append(
            f"{path}: param_alignment_paddings: written with zero_optimization.parameter_alignment"
            f", which cannot be resharded. {SAME_TOPOLOGY}"
        )
        return facts
    if more := sorted(set(base_state(state)) - {"state", "param_groups"}):
        problems.append(
            f"{path}: base_optimizer_state: {', '.join(map(str, more))}: kept by the optimizer "
            f"beside its state, which cannot be resharded. {SAME_TOPOLOGY}"
        )
        return facts
    states = group_states(state)
    if not len(states) == len(sizes) == len(masters(state)):
        raise ValueError(f"{path.name}: {len(masters(state))} groups of masters")
    for master, entries, size in zip(masters(state), states, sizes, strict=True):
        # Stages 1 and 2 save masters without trailing padding.
        if master.numel() > size or master.dtype != master_dtype:
            problems.append(
                f"{path}: masters: {master.numel()} values of {master.dtype} must be at most "
                f"{size} of {master_dtype}. Use the precision that it was written with."
            )
        if set(entries) != set(states[0]):
            problems.append(
                f"{path}: state: {sorted(entries)} in one group, {sorted(states[0])} in another. "
                f"{SAME_TOPOLOGY}"
            )
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.numel() == size and value.dim() == 1:
                if dtypes.setdefault(key, value.dtype) != value.dtype:
                    problems.append(
                        f"{path}: state.{key}: {value.dtype} in one group, {dtypes[key]} in "
                        f"another. {SAME_TOPOLOGY}"
                    )
            elif isinstance(value, (int, float)) or (
                isinstance(value, torch.Tensor) and value.numel() == 1
            ):
                if float(scalars.setdefault(key, value)) != float(value):
                    problems.append(
                        f"{path}: state.{key}: differs between parameters. {SAME_TOPOLOGY}"
                    )
            else:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
                problems.append(
                    f"{path}: state.{key}: {shape} must be a number, or have a value for each "
                    f"weight ({size} here). {SAME_TOPOLOGY}"
                )
    return facts


def _shard_differences(shards: list[dict[str, Any]]) -> list[str]:
    """Return a line for each value that must be the same in all shards but is not."""
    return [
        f"{shard['path']}: state: {key} is {shard[key]}, but in {shards[0]['path']} it is "
        f"{shards[0][key]}. Resume from another checkpoint."
        for shard in shards[1:]
        for key in ("scalars", "dtypes")
        if shard[key] != shards[0][key]
    ]


def _model_problems(
    path: Path,
    model_state: dict[str, Any],
    theirs: Mapping[str, int],
    ours: Mapping[str, int],
    template: dict[str, Any],
) -> list[str]:
    problems = []
    if ours != theirs:
        names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        problems.append(
            f"{path}: param_shapes: differ from this model: {', '.join(names[:4])}. Use the "
            f"--model_config that it was written with."
        )
    if any(padding for group in template.get("param_alignment_paddings", []) for padding in group):
        problems.append(
            "--deepspeed_config: zero_optimization.parameter_alignment: states cannot be resharded "
            "for it. Remove the key, or resume with the topology of the checkpoint."
        )
    return problems


# -------------------------------------------------------------------------------------------------
# Load this rank's states


def _set_rank_state(
    template: dict[str, Any],
    flats: list[dict[str, torch.Tensor]],
    scalars: dict[str, Any],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Replace the states in a fresh engine's state dict with this rank's loaded states, in the
    optimizer's format.

    Args:
        template: the fresh engine's state dict.
        flats: {state name: this rank's flat values} for each group.
        scalars: states with one value for all parameters, such as the step.
    """
    # Assign a new list, because the template's list may belong to the engine.
    template[masters_key(template)] = [flat.pop(MASTER) for flat in flats]
    if not scalars and not any(flats):
        return  # saved before the first optimizer step: a fresh engine has the same states
    # torch's optimizers count steps in a tensor, DeepSpeed's in an int; others keep the type.
    library = _library(optimizer)
    renamed = RENAMED_STATES.get(type(optimizer).__name__, {})
    base = base_state(template)
    numbers = [number for group in base["param_groups"] for number in group["params"]]
    base["state"] = {
        number: {
            **{renamed.get(key, key): value for key, value in flat.items()},
            **{key: _scalar(value, library) for key, value in scalars.items()},
        }
        for number, flat in zip(numbers, flats, strict=True)
    }


def _library(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__module__.partition(".")[0]


def _scalar(value: Any, library: str) -> Any:
    if library == "torch":
        return torch.tensor(float(value))
    return int(value) if library == "deepspeed" else copy.deepcopy(value)


def _copy_shared_state(template: dict[str, Any], shard: dict[str, Any], *, scheduled: bool) -> None:
    """Copy the state that all ranks share: the loss scale, and options set by a scheduler."""
    if template.get("dynamic_loss_scale") and shard.get("dynamic_loss_scale"):
        template["loss_scaler"] = shard["loss_scaler"]
    groups, old = base_state(template)["param_groups"], base_state(shard)["param_groups"]
    if scheduled and len(groups) == len(old):
        for group, before in zip(groups, old, strict=True):
            group.update({key: before[key] for key in SCHEDULED_KEYS if key in group})


def _copy_group_states(
    template: dict[str, Any], shard: dict[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    """Copy what a user's own optimizer keeps in its parameter groups, such as a step count: all but
    its constructor's arguments, which the profile sets.
    """
    arguments = signature(type(optimizer)).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in arguments.values())
    own = set() if takes_any else optimizer.defaults.keys()
    groups, old = base_state(template)["param_groups"], base_state(shard)["param_groups"]
    for group, before in zip(groups, old, strict=True):
        for key in before.keys() - arguments.keys() - {"params"}:
            if key in own or key not in group:
                group[key] = before[key]


def _load_into_engine(engine: Any, state: dict[str, Any]) -> None:
    """Load this rank's state dict into the engine, and recompute the weights from the masters.

    `load_state_dict` takes a list with all ranks' states, but reads only this rank's.
    """
    optimizer = engine.optimizer
    rank = distributed.get_rank(optimizer.dp_process_group)
    partitioned = engine.zero_optimization_stage() == 3
    if partitioned:
        optimizer.checkpoint_event_prologue()
    optimizer.load_state_dict(
        [None] * rank + [state], load_optimizer_states=True, load_from_fp32_weights=True
    )
    if partitioned:
        optimizer.checkpoint_event_epilogue()
    else:
        update_weights(engine)


@torch.no_grad()
def _restore_frozen(engine: Any, weights: Weights) -> None:
    """Restore parameters that are not trained; another stage may have them."""
    own = dict(engine.module.named_parameters())
    for name in weights.frozen & own.keys():
        parameter = own[name]
        with gathered([parameter], modifier_rank=0):
            if not is_partitioned(parameter) or engine.global_rank == 0:
                parameter.copy_(weights[name])


def _restore_counters(engine: Any, model_state: dict[str, Any]) -> None:
    """Restore DeepSpeed's counters and scheduler, and the model's buffers."""
    engine.global_steps = model_state["global_steps"]
    engine.global_samples = model_state["global_samples"]
    engine.skipped_steps = model_state["skipped_steps"]
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(model_state["lr_scheduler"])
    buffers = dict(engine.module.named_buffers())
    for name in model_state["buffer_names"]:
        if name in buffers or groups_of(engine.optimizer) is None:  # another stage may have it
            buffers[name].copy_(model_state["module"][name])
