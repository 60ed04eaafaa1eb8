"""Access to a rank's weights, master weights and optimizer states in DeepSpeed 0.19.8."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from zerolm.engine.parameters import is_partitioned, residence

CHUNK_VALUES = 1 << 22  # number of master weights changed at a time, to limit extra memory
WEIGHTS, MASTERS = "weights", "master weights"
MODEL_WEIGHTS = ("bit16_groups_flat", "bf16_groups_flat", "fp16_partitioned_groups_flat")
MASTER_PARTITIONS = (
    "fp32_partitioned_groups_flat",  # stage 3
    "fp32_groups_flat_partition",  # BF16_Optimizer
    "single_partition_of_fp32_groups",
)


class OnNvme(Exception):
    """The master weights are on NVMe, where reading them would take as long as a step."""


# -------------------------------------------------------------------------------------------------
# Master weights


class MasterSlice(NamedTuple):
    """This rank's values of a parameter in its flat master weights, without padding.

    Attributes:
        flat: the flat partition.
        offset: index of the first value in the partition.
        start: index of the same value in the parameter.
        length: number of values.
    """

    flat: torch.Tensor
    offset: int
    start: int
    length: int

    @property
    def values(self) -> torch.Tensor:
        return self.flat.data.narrow(0, self.offset, self.length)


def master_partitions(engine: Any) -> list[torch.Tensor]:
    """Return this rank's flat partitions of master weights."""
    return partitions_of(engine.optimizer)


def partitions_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the flat partitions of master weights of DeepSpeed's optimizer."""
    name = next(name for name in MASTER_PARTITIONS if hasattr(optimizer, name))
    return list(getattr(optimizer, name))


def master_slice(engine: Any, parameter: Any) -> MasterSlice | None:
    """Return the location of a trained parameter's values on this rank, or None if the rank stores
    none.

    Raises:
        OnNvme: the values are on NVMe.
    """
    masters, optimizer = master_partitions(engine), engine.optimizer
    if is_partitioned(parameter):
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        if optimizer._swappable_optimizer_subgroup(group):
            raise OnNvme
        own = residence(parameter)
        return MasterSlice(masters[group], offset, own.start, own.length)
    if (part := getattr(parameter, "_hp_mapping", None)) is None:
        return None
    address, start = part.hp_fragment_address, part.lp_fragment_address.start
    return MasterSlice(masters[part.param_group_index], address.start, start, address.numel)


def set_master(parameter: Any, value: torch.Tensor) -> None:
    """Set this rank's part of a parameter's master weight.

    Args:
        value: the complete parameter.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    own = residence(parameter)
    if not is_partitioned(parameter):
        part = value if own.dim is None else value.narrow(own.dim, own.start, own.length)
        safe_set_full_fp32_param(parameter, part)
        return
    # DeepSpeed 0.19.8 cannot set a complete parameter whose size is not a multiple of the number of
    # ranks.
    part = value.flatten()[own.start : own.start + own.length]
    padded = torch.nn.functional.pad(part, (0, parameter.ds_tensor.ds_numel - own.length))
    safe_set_local_fp32_param(parameter, padded)


def update_weights(engine: Any) -> None:
    """Compute the model's weights from the master weights, as DeepSpeed does after a step."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()


# -------------------------------------------------------------------------------------------------
# States of the optimizer


class State(NamedTuple):
    """A tensor that must not change between two optimizer steps.

    Attributes:
        kind: `WEIGHTS`, `MASTERS`, or the name of an optimizer state.
        group: index of its flat partition.
        values: flat tensor.
    """

    kind: str
    group: int
    values: torch.Tensor


def optimizer_states(engine: Any) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the states of the optimizer that ZeRO wraps, keyed by master partition."""
    return engine.optimizer.optimizer.state


def drop_state(engine: Any, name: str) -> None:
    """Drop an optimizer state that may have been loaded from a checkpoint."""
    for master in master_partitions(engine):
        optimizer_states(engine).get(master, {}).pop(name, None)
    for parameter in engine.module.parameters():  # DeepSpeed keeps views of loaded states
        fragments = getattr(getattr(parameter, "_hp_mapping", None), "optim_fragment", None)
        if fragments:
            fragments.pop(name, None)


def model_weights(engine: Any) -> list[torch.Tensor | None]:
    """Return the flat weights used in the forward pass; at stage 3, this rank's partitions of them.

    An element is None if its weights are on NVMe.
    """
    name = next(name for name in MODEL_WEIGHTS if hasattr(engine.optimizer, name))
    return list(getattr(engine.optimizer, name))


def states(engine: Any) -> Iterator[State]:
    """Yield those of this rank's states that are in memory, weights first."""
    for group, flat in enumerate(model_weights(engine)):
        if flat is not None and flat.numel():
            yield State(WEIGHTS, group, flat.detach().view(-1))
    inner = optimizer_states(engine)
    for group, master in enumerate(master_partitions(engine)):
        if not master.numel():
            continue  # on NVMe, as are its moments
        yield State(MASTERS, group, master.detach().view(-1))
        for name, value in inner.get(master, {}).items():
            if torch.is_tensor(value) and value.numel() > 1:
                yield State(name, group, value.detach().view(-1))


def parameters_in(engine: Any, state: State, start: int, stop: int) -> list[str]:
    """Return the names of the parameters whose values are between `start` and `stop` in a state."""
    flat = model_weights(engine)[state.group]
    if flat is None:
        return []
    if state.kind != WEIGHTS and engine.zero_optimization_stage() < 3:
        rank = torch.distributed.get_rank(data_parallel_group(engine, state.group))
        offset = rank * state.values.numel()
        start, stop = start + offset, stop + offset
    size, address = flat.element_size(), flat.data_ptr()
    found = []
    for name, parameter in engine.module.named_parameters():
        values = getattr(parameter, "ds_tensor", parameter)
        first = (values.data_ptr() - address) // size
        if first < stop and first + values.numel() > start and _share_memory(values, flat):
            found.append(name)
    return found


def data_parallel_group(engine: Any, group: int) -> Any:
    """Return the process group over which a parameter group's states are sharded."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return optimizer.sub_group_process_groups[group]
    return optimizer.real_dp_process_group[group]


def shard_group(engine: Any) -> Any:
    """Return the process group over which one copy of the optimizer states is sharded."""
    return engine.optimizer.dp_process_group


def _share_memory(values: torch.Tensor, flat: torch.Tensor) -> bool:
    return values.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
