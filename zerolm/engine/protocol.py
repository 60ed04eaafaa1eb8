"""What the code outside this subpackage may use of DeepSpeed's engine and of its optimizer.

All of it is in DeepSpeed's documentation, or has its name for years. What else is needed is a
function of this subpackage, whose modules see the engine without types.
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
    """DeepSpeed's optimizer of ZeRO stage 1, 2 or 3.

    Attributes:
        optimizer: the one that ZeRO wraps; its parameters are flat partitions.
        param_groups: those of the wrapped optimizer.
    """

    optimizer: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]


class Engine(Model, Protocol):
    """DeepSpeed's engine, of ZeRO stage 1, 2 or 3 with any offload.

    Attributes:
        module: the model of transformers.
        lr_scheduler: DeepSpeed's scheduler, None if the JSON has none.
        checkpoint_mp_rank: the part of the model that this rank has, with tensor parallelism.
    """

    module: Any
    optimizer: Optimizer
    lr_scheduler: Any
    global_rank: int
    world_size: int
    checkpoint_mp_rank: int

    def zero_optimization_stage(self) -> int: ...

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> Any: ...

    def was_step_applied(self) -> bool: ...

    def destroy(self) -> None: ...
