"""Sum gradients with fewer passes over memory than DeepSpeed, with bit-identical results.

`REPLACED` lists the methods (DeepSpeed 0.19.8), with their memory traffic in bytes per parameter.
BF16_Optimizer implements ZeRO-1 with bf16 weights and float32 gradient sums. The remaining traffic
is measured in tests/zerolm/plan/test_moved_bytes.py.
"""

from typing import Any

import torch

from zerolm.engine import replaced
from zerolm.engine.gradient_reduction import reduce_to_owners
from zerolm.engine.stages import num_replicas


def spare_memory_traffic(engine: Any, across: Any = None, hosts: int = 1) -> None:
    """Replace DeepSpeed methods that read or write gradients more often than necessary.

    Args:
        engine: an engine of any ZeRO stage; changed permanently. There are no such methods for
            stage 3.
        across, hosts: see `reduce_to_owners`.
    """
    optimizer = engine.optimizer
    reduction = reduce_to_owners(engine, across, hosts)
    assert across is None or reduction is not None, "preflight refuses it"
    is_single = num_replicas(optimizer) == 1
    if hasattr(optimizer, "_add_to_grad_partition_buffer"):
        replaced.install(optimizer, "_add_to_grad_partition_buffer", _add)
        # On a single rank, 4 bytes fewer per micro-batch.
        optimizer.gradient_average = optimizer.gradient_average and not is_single
    if not hasattr(optimizer, "fp32_groups_gradients"):
        return
    clear = optimizer.clear_hp_grads

    @torch.no_grad()
    def add(parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        if parameter.grad is None:
            return
        total = optimizer.fp32_groups_gradients[group][index]
        _add(total, parameter.grad.view(total.shape))
        parameter._hp_grad = total
        optimizer.fp32_groups_has_gradients[group][index] = True
        if reduction is not None:
            reduction.add(group, index)

    def clear_once() -> None:
        if any(map(any, optimizer.fp32_groups_has_gradients)):
            clear()

    replaced.install(optimizer, "_update_hp_grad", add)
    replaced.install(optimizer, "clear_hp_grads", clear_once)
    is_exact = engine.communication_data_type == torch.float32
    if is_single and is_exact and engine.gradient_predivide_factor() == 1:
        replaced.install(engine, "buffered_allreduce_fallback", lambda *args, **kwargs: None)


@torch.no_grad()
def _add(total: torch.Tensor | None, gradient: torch.Tensor) -> None:
    """Add a gradient that may have another dtype; a GPU converts it while reading."""
    if total is not None:
        total.add_(gradient)
