"""Access to a model's parameters, which ZeRO-3 may have partitioned (DeepSpeed 0.19.8).

A partitioned parameter is empty; its attributes store the shape, number of values and partition.
Without ZeRO-3, these functions do the same as torch's.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from zerolm.engine.experts import expert_group, is_divided, mark_for_partition


def partitioned_while_built(config: dict[str, Any] | None) -> AbstractContextManager[Any]:
    """Return a context in which a model is constructed with parameters that ZeRO-3 partitions.

    Args:
        config: the resolved DeepSpeed JSON; None to keep parameters complete.
    """
    if config is None:
        return nullcontext()
    import deepspeed

    # Without tensor overrides, buffers are computed on the CPU in float32, as they are without
    # ZeRO. DeepSpeed's default casts them to bf16 (a rotary frequency of 0.56234 becomes 0.5625).
    return deepspeed.zero.Init(config_dict_or_path=config, tensor_overrides=[])


def replace(old: Any, new: Any) -> None:
    """Partition the slice of experts `new` as ZeRO-3 has partitioned the parameter `old`, whose
    memory is freed. Does nothing at other stages. Every rank must call this.

    Args:
        new: marked as divided.
    """
    if not is_partitioned(old):
        return
    old.ds_tensor.data = old.ds_tensor.data.new_empty(0)  # its attributes refer to each other
    mark_for_partition(new)
    old.convert_to_zero_parameters(param_list=[new])


def full_shape(parameter: Any) -> torch.Size:
    """Return the shape of the complete parameter."""
    return getattr(parameter, "expert_shape", own_shape(parameter))


def own_shape(parameter: Any) -> torch.Size:
    """Return the shape of a parameter or of this rank's slice, before ZeRO-3 partitions it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def num_values(parameter: Any) -> int:
    """Return the number of values in the complete parameter."""
    return full_shape(parameter).numel()


def is_partitioned(parameter: Any) -> bool:
    """Return whether ZeRO-3 partitions a parameter over the ranks."""
    return hasattr(parameter, "ds_tensor")


class Residence(NamedTuple):
    """Where this rank's values of a parameter are in the complete parameter.

    Attributes:
        group: the process group over which the parameter is divided; None if this rank has it all.
        dim: the dimension that is divided; None: the flattened parameter is.
        start, length: range of this rank's values on that dimension, without padding.
        shape: shape of the complete parameter.
    """

    group: Any
    dim: int | None
    start: int
    length: int
    shape: torch.Size


def residence(parameter: Any) -> Residence:
    """Return where this rank's values of a parameter are: a partition of ZeRO-3, a shard of tensor
    parallelism, some of the experts, or all of it.
    """
    if is_partitioned(parameter):
        group, length = parameter.ds_process_group, parameter.ds_tensor.ds_numel
        start = min(torch.distributed.get_rank(group=group) * length, parameter.ds_numel)
        length = min(length, parameter.ds_numel - start)
        return Residence(
            group, None, _first_value(parameter) + start, length, full_shape(parameter)
        )
    if divided_over(parameter) == "tensor":
        from deepspeed.utils import groups

        group = groups.get_tensor_model_parallel_group()
        index = torch.distributed.get_rank(group=group)
        about = parameter.ds_autotp_universal_checkpoint_meta
        sizes, shape = about["partition_sizes"], torch.Size(about["logical_shape"])
        return Residence(group, about["partition_dim"], sum(sizes[:index]), sizes[index], shape)
    if divided_over(parameter) == "experts":
        group, shape = expert_group(parameter.expert_degree), parameter.expert_shape
        length = shape[0] // parameter.expert_degree
        return Residence(group, 0, torch.distributed.get_rank(group) * length, length, shape)
    return Residence(None, None, 0, parameter.numel(), parameter.shape)


def _first_value(parameter: Any) -> int:
    """Return where the values of a partitioned parameter begin in the complete one: those of this
    rank's experts.
    """
    if not is_divided(parameter):
        return 0
    group = expert_group(parameter.expert_degree)
    return int(torch.distributed.get_rank(group) * parameter.ds_numel)


def divided_over(parameter: Any) -> str | None:
    """Return the axis of the `Layout` over which a parameter is divided at every ZeRO stage."""
    if is_divided(parameter):
        return "experts"
    return "tensor" if getattr(parameter, "tensor_model_parallel", False) else None


def divided_among(parameter: Any) -> Any:
    """Return the process group over which a parameter is divided at every ZeRO stage; None if each
    rank, or its ZeRO-3 group, has all of it.
    """
    if divided_over(parameter) == "experts":
        return expert_group(parameter.expert_degree)
    return residence(parameter).group if divided_over(parameter) else None


def multiply(parameter: Any, factor: float) -> None:
    """Multiply this rank's values of a parameter, including its ZeRO-3 partition."""
    parameter.data.mul_(factor)
    if is_partitioned(parameter):
        parameter.ds_tensor.data.mul_(factor)


def own_values(parameter: Any) -> torch.Tensor | None:
    """Return this rank's values of a partitioned parameter, flat and without padding.

    Returns None if the values are on NVMe, since reading them would take as long as a step.
    """
    partition = parameter.ds_tensor
    if partition.status.name == "NOT_AVAILABLE":
        return None
    return partition.data.flatten()[: residence(parameter).length]


def zero_padding(model: torch.nn.Module) -> None:
    """Zero the padding of the last rank's ZeRO-3 partitions, which is uninitialized memory.

    The padding affects no result, but it is saved in every checkpoint, so the files of equal states
    would differ. Source: deepspeed/runtime/zero/partition_parameters.py 0.19.8, `_partition_param`.
    """
    parameter: Any
    for parameter in model.parameters():
        if is_partitioned(parameter) and parameter.ds_tensor.status.name == "AVAILABLE":
            parameter.ds_tensor.data.view(-1)[residence(parameter).length :].zero_()


def cast(parameter: Any, dtype: torch.dtype) -> None:
    """Cast a parameter, or this rank's partition of it."""
    parameter.data = parameter.data.to(dtype)
    if is_partitioned(parameter):
        parameter.ds_tensor.data = parameter.ds_tensor.data.to(dtype)


@contextmanager
def gathered(
    parameters: Sequence[Any], modifier_rank: int | None = None, group: Any = None
) -> Iterator[None]:
    """Gather partitioned parameters and divided experts inside this context. Every rank must call
    this.

    Does nothing for parameters that this rank has completely.

    Args:
        modifier_rank: rank whose changes are broadcast on exit; None if there are no changes.
        group: process group of the ranks that have these parameters, without ZeRO-3; None: all.
    """
    experts = [each for each in parameters if divided_over(each) == "experts"]
    if experts:
        others = [each for each in parameters if divided_over(each) != "experts"]
        with gathered(others, modifier_rank), _gathered_experts(experts, modifier_rank, group):
            yield
    elif any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier_rank):
            yield
    else:
        yield


@contextmanager
def _gathered_experts(
    parameters: Sequence[Any], modifier_rank: int | None, group: Any
) -> Iterator[None]:
    if is_partitioned(parameters[0]):
        import deepspeed

        # After `_whole_experts` all ranks have the modifier's values, so any may be the source.
        source = None if modifier_rank is None else 0
        with (
            deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=source),
            _whole_experts(parameters, modifier_rank, group),
        ):
            yield
        return
    with _whole_experts(parameters, modifier_rank, group):
        yield


@contextmanager
def _whole_experts(
    parameters: Sequence[Any], modifier_rank: int | None, group: Any
) -> Iterator[None]:
    own = [each.data for each in parameters]
    for parameter, values in zip(parameters, own, strict=True):
        parameter.data = values.new_empty(parameter.expert_shape)
        slices = list(parameter.data.split(len(values)))
        neighbours = expert_group(parameter.expert_degree)
        torch.distributed.all_gather(slices, values.contiguous(), group=neighbours)
    try:
        yield
    finally:
        for parameter, values in zip(parameters, own, strict=True):
            if modifier_rank is not None:
                torch.distributed.broadcast(parameter.data, src=modifier_rank, group=group)
                index = torch.distributed.get_rank(expert_group(parameter.expert_degree))
                values.copy_(parameter.data.narrow(0, index * len(values), len(values)))
            parameter.data = values


@contextmanager
def gathered_again(weight: Any) -> Iterator[None]:
    """Gather a weight that ZeRO-3 has released, like DeepSpeed's own linear function.

    Gradient checkpointing reruns a block's forward pass, after which ZeRO-3 releases weights that
    it had gathered for the backward pass.
    """
    status = getattr(weight, "ds_status", None)
    if getattr(status, "name", None) != "NOT_AVAILABLE":
        yield
        return
    weight.all_gather()
    try:
        yield
    finally:
        weight.partition()
