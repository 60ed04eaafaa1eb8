"""Where DeepSpeed 0.19.8 keeps the weights, optimizer states and reduced gradients of a rank."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zerolm.optim.masters import master_partitions

WEIGHTS, MASTERS = "weights", "master weights"
MODEL_WEIGHTS = ("bit16_groups_flat", "bf16_groups_flat", "fp16_partitioned_groups_flat")


class State(NamedTuple):
    """A tensor that must not change between two optimizer steps.

    Attributes:
        kind: `WEIGHTS`, `MASTERS`, or the name of an optimizer state.
        group: number of its flat partition.
        values: flat.
    """

    kind: str
    group: int
    values: torch.Tensor


def model_weights(engine: Any) -> list[torch.Tensor | None]:
    """Return the flat weights that the model computes with: at stage 3 this rank's partitions.

    None where they are on NVMe.
    """
    name = next(name for name in MODEL_WEIGHTS if hasattr(engine.optimizer, name))
    return list(getattr(engine.optimizer, name))


def states(engine: Any) -> Iterator[State]:
    """Yield the states of this rank that are in memory, weights first."""
    for group, flat in enumerate(model_weights(engine)):
        if flat is not None and flat.numel():
            yield State(WEIGHTS, group, flat.detach().view(-1))
    inner = engine.optimizer.optimizer.state
    for group, master in enumerate(master_partitions(engine)):
        if not master.numel():
            continue  # on NVMe, with its moments
        yield State(MASTERS, group, master.detach().view(-1))
        for name, value in inner.get(master, {}).items():
            if torch.is_tensor(value) and value.numel() > 1:
                yield State(name, group, value.detach().view(-1))


def parameters_in(engine: Any, state: State, start: int, stop: int) -> list[str]:
    """Return the names of the parameters with values from `start` to `stop` of a state."""
    flat = model_weights(engine)[state.group]
    if flat is None:
        return []
    if state.kind != WEIGHTS and engine.zero_optimization_stage() < 3:
        offset = torch.distributed.get_rank(_group(engine, state.group)) * state.values.numel()
        start, stop = start + offset, stop + offset
    size, address = flat.element_size(), flat.data_ptr()
    found = []
    for name, parameter in engine.module.named_parameters():
        values = getattr(parameter, "ds_tensor", parameter)
        first = (values.data_ptr() - address) // size
        if first < stop and first + values.numel() > start and _share_memory(values, flat):
            found.append(name)
    return found


def _group(engine: Any, group: int) -> Any:
    groups = engine.optimizer.real_dp_process_group
    return groups[group]


def _share_memory(values: torch.Tensor, flat: torch.Tensor) -> bool:
    return values.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


class Gradients:
    """This rank's part of the reduced gradient, between the last backward pass and the update."""

    def __init__(self, engine: Any):
        self._engine, self._optimizer = engine, engine.optimizer
        self._names = {id(each): name for name, each in engine.module.named_parameters()}
        self.names: list[str] = []  # of the parameters, in the order of `slices`

    def slices(self) -> list[torch.Tensor]:
        """Return the values of this rank, by parameter; always the same parameters."""
        parts = list(self._parts())
        if not self.names:
            self.names = [self._names[id(parameter)] for parameter, _ in parts]
        assert len(parts) == len(self.names)
        return [values for _, values in parts]

    def _parts(self) -> Iterator[tuple[Any, torch.Tensor]]:
        optimizer = self._optimizer
        if hasattr(optimizer, "fp32_groups_gradients"):  # BF16_Optimizer
            for number, parameters in enumerate(optimizer.bf16_groups):
                partition = optimizer.fp32_groups_gradient_flat_partition[number]
                size = partition.numel()
                first = -size * torch.distributed.get_rank(_group(self._engine, number))
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
            parameters = [each for each in group if each.requires_grad]
            if offload:
                yield from self._offloaded(number, parameters)
            else:
                yield from self._on_device(number, group)

    def _offloaded(self, number: int, group: Sequence[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
        gradient = master_partitions(self._engine)[number].grad
        if gradient is None:  # on NVMe
            return
        for parameter in group:
            position = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            offset, length = position[-2:]
            yield parameter, gradient.narrow(0, offset, length)

    def _on_device(self, number: int, group: Sequence[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
        parameters = iter(group)
        for gradient in self._optimizer.averaged_gradients[number]:
            if getattr(gradient, "_zero_padding", False):
                continue
            parameter = next(parameters, None)
            if parameter is not None:  # otherwise padding at the end
                yield parameter, gradient
