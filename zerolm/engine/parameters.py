"""Access to a model's parameters, which ZeRO-3 may have partitioned (DeepSpeed 0.19.8).

A partitioned parameter is empty; its attributes store the shape, number of values and partition.
Without ZeRO-3, these functions do the same as torch's.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


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


def full_shape(parameter: Any) -> torch.Size:
    """Return the shape of the complete parameter."""
    return getattr(parameter, "ds_shape", parameter.shape)


def num_values(parameter: Any) -> int:
    """Return the number of values in the complete parameter."""
    return getattr(parameter, "ds_numel", parameter.numel())


def is_partitioned(parameter: Any) -> bool:
    """Return whether ZeRO-3 partitions a parameter over the ranks."""
    return hasattr(parameter, "ds_tensor")


def is_shard(parameter: Any) -> bool:
    """Return whether tensor parallelism shards a parameter; if not, each rank of a replica has all
    of it.
    """
    return getattr(parameter, "tensor_model_parallel", False)


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
    flat = partition.data.flatten()
    return flat[: _num_own(parameter, flat)]


def zero_padding(model: torch.nn.Module) -> None:
    """Zero the padding of the last rank's ZeRO-3 partitions, which is uninitialized memory.

    The padding affects no result, but it is saved in every checkpoint, so the files of equal states
    would differ. Source: deepspeed/runtime/zero/partition_parameters.py 0.19.8, `_partition_param`.
    """
    parameter: Any
    for parameter in model.parameters():
        if is_partitioned(parameter) and parameter.ds_tensor.status.name == "AVAILABLE":
            flat = parameter.ds_tensor.data.view(-1)
            flat[_num_own(parameter, flat) :].zero_()


def cast(parameter: Any, dtype: torch.dtype) -> None:
    """Cast a parameter, or this rank's partition of it."""
    parameter.data = parameter.data.to(dtype)
    if is_partitioned(parameter):
        parameter.ds_tensor.data = parameter.ds_tensor.data.to(dtype)


@contextmanager
def gathered(parameters: Sequence[Any], modifier_rank: int | None = None) -> Iterator[None]:
    """Gather partitioned parameters inside this context. Every rank must call this.

    Does nothing for parameters that ZeRO-3 has not partitioned.

    Args:
        modifier_rank: rank whose changes are broadcast on exit; None if there are no changes.
    """
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier_rank):
            yield
    else:
        yield


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


def _num_own(parameter: Any, partition: torch.Tensor) -> int:
    """Return the number of values in this rank's partition, excluding padding."""
    return max(0, parameter.ds_numel - torch.distributed.get_rank() * partition.numel())
