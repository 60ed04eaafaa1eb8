"""The parts of DeepSpeed's engine and optimizer that code outside this subpackage may use.

DeepSpeed documents all of these, or has not renamed them for years. Anything else is wrapped in a
function of this subpackage, whose modules use the engine untyped.
"""

from typing import Any, Protocol

import torch


class Model(Protocol):
    """A causal language model, or DeepSpeed's engine around one."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def train(self) -> Any: ...

    def eval(self) -> Any: ...


class Optimizer(Protocol):
    """DeepSpeed's optimizer for ZeRO stage 1, 2 or 3.

    Attributes:
        optimizer: the optimizer that ZeRO wraps; its parameters are flat partitions.
        param_groups: parameter groups of the wrapped optimizer.
    """

    optimizer: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]


class Engine(Model, Protocol):
    """DeepSpeed's engine for ZeRO stage 1, 2 or 3, with any offload.

    Attributes:
        module: the transformers model.
        lr_scheduler: DeepSpeed's scheduler; None if the JSON configures none.
    """

    module: Any
    optimizer: Optimizer
    lr_scheduler: Any
    global_rank: int
    world_size: int

    def zero_optimization_stage(self) -> int: ...

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> Any: ...

    def was_step_applied(self) -> bool: ...

    def destroy(self) -> None: ...
