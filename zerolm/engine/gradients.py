"""`gradients`: where DeepSpeed 0.19.8 stores a rank's reduced gradient at each ZeRO stage."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerolm.engine.parameters import residence
from zerolm.engine.states import partitions_of


def gradients(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """Return this rank's part of the reduced gradient as pairs (parameter name, values).

    Each gradient value is on exactly one rank or, with `--shard_within`, on one rank of each group;
    there is no padding. With tensor parallelism, the gradient of a parameter that is not sharded is
    on all ranks of a replica; with pipeline stages, that of a matrix which the first and last one
    share is on both. Between the last backward pass of a step and its update, the values
    are the mean over ranks before clipping, multiplied by the fp16 loss scale. The values are
    views: changing them changes the optimizer step. On a given rank, the parameters and their order
    are the same at every step; parameters whose gradients are on NVMe are left out. There is no
    communication between ranks.
    """
    names = {id(each): name for name, each in engine.module.named_parameters()}
    return [(names[id(parameter)], values) for parameter, values in parts(engine.optimizer)]


def loss_scale(engine: Any) -> float:
    """Return the fp16 loss scale, by which losses and gradients are multiplied; 1 in other
    precisions.
    """
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def parts(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield (parameter, values), as `gradients` returns them."""
    if hasattr(optimizer, "fp32_groups_gradients"):  # BF16_Optimizer
        for number, parameters in enumerate(optimizer.bf16_groups):
            partition = optimizer.fp32_groups_gradient_flat_partition[number]
            size = partition.numel()
            first = -size * torch.distributed.get_rank(optimizer.real_dp_process_group[number])
            for parameter in parameters:
                start, stop = max(first, 0), min(first + parameter.numel(), size)
                if start < stop:
                    yield parameter, partition[start:stop]
                first += parameter.numel()
        return
    is_stage_3 = hasattr(optimizer, "fp16_groups")
    groups = optimizer.fp16_groups if is_stage_3 else optimizer.params_in_partition
    offload = optimizer.offload_optimizer if is_stage_3 else optimizer.cpu_offload
    for number, group in enumerate(groups):
        trained = [each for each in group if each.requires_grad]
        on_host = _offloaded(optimizer, number, trained)
        for parameter, values in on_host if offload else _on_device(optimizer, number, group):
            if is_stage_3:
                values = values.view(-1)[: residence(parameter).length]
            if values.numel():
                yield parameter, values


def _offloaded(optimizer: Any, number: int, group: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    gradient = partitions_of(optimizer)[number].grad
    if gradient is None:  # on NVMe
        return
    for parameter in group:
        offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)][-2:]
        yield parameter, gradient.narrow(0, offset, length)


def _on_device(optimizer: Any, number: int, group: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    parameters = iter(group)
    for gradient in optimizer.averaged_gradients[number]:
        if getattr(gradient, "_zero_padding", False):
            continue
        parameter = next(parameters, None)
        if parameter is not None:  # None: padding at the end
            yield parameter, gradient
