"""Changes to the hooks of DeepSpeed 0.19.8 that gather and release weights under ZeRO-3.

The hooks record in which order modules run, and prefetch by that record in later passes.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def fit_zero3_to_recomputation() -> None:
    """Change DeepSpeed for good, so that recomputed activations are those of the forward pass.

    - Its linear function adds biases out of place. It adds them in place to the output of the
      matmul, which `selective` keeps, inside an autograd function, where torch does not notice
      that the kept tensor changes; the recomputation would add the bias a second time.
    - Its hooks gather and release weights unseen by `selective`, which requires that a block runs
      the same operators in the forward pass and in the recomputation. What the hooks have to run
      depends on what is gathered already: persistent parameters after a load, prefetched ones,
      those that an evaluation before the first step has left.
    - A recomputation ends as soon as it has what it needs, by an exception, which leaves modules on
      the hooks' stack of running ones: a few for each block and micro-batch. The stack is emptied
      when the model starts.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    LinearFunctionForZeroStage3.forward = staticmethod(_linear)
    offload = parameter_offload.DeepSpeedZeRoOffload
    _wrap(offload, "pre_sub_module_forward_function", _outside_dispatch_modes)
    _wrap(offload, "post_sub_module_forward_function", _outside_dispatch_modes)
    _wrap(offload, "pre_sub_module_forward_function", _with_an_empty_stack)
    _wrap(parameter_offload, "register_external_parameter", _gathering_too)


def follow_external_parameters() -> None:
    """Change DeepSpeed for good, so that a module may read its children's weights in any pass.

    Mamba-2's mixer and Qwen3-Next's read the weight of a convolution instead of calling it. Where
    it is not gathered DeepSpeed adds it to what it gathers for the mixer, but its record of the
    order was made without it: "tracing error at step". That is so in a pass before which all
    weights were released, as when a step is computed again, if the first pass of this process found
    the weight gathered, as after a load. The record is then made again.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    coordinator = PartitionedParameterCoordinator
    _wrap(coordinator, "construct_parameter_trace_from_module_trace", _counting_external)
    _wrap(coordinator, "trace_prologue", _invalidating_on_external)


def leave_partitions_out_of_graphs() -> None:
    """Stop DeepSpeed's linear function from asking in a graph whether a weight is partitioned.

    All weights of a compiled block are gathered. torch 2.11 would compile a graph for each block,
    since it guards on the weight's `ds_id` in the first block.
    """
    import torch
    from deepspeed.runtime.zero import linear, partition_parameters

    def is_zero_param(parameter: Any) -> bool:
        return not torch.compiler.is_compiling() and partition_parameters.is_zero_param(parameter)

    linear.is_zero_param = is_zero_param


def bound_gathers(engine: Any, new_event: Callable[[], Any] = torch.cuda.Event) -> None:
    """Let the host gather a block, and what follows it, only when the block before it has begun.

    Launching a block takes much less time than running it, and memory that a stream still uses
    is not given to another: a host that runs ahead would gather the weights of many blocks.

    Args:
        engine: of ZeRO-3 on CUDA, where blocks are leaf modules.
        new_event: for tests.
    """
    from deepspeed.utils import z3_leaf_module

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    fetch = coordinator.fetch_sub_module
    last: Any = None
    begun = new_event()
    begun.record()

    def fetch_when_begun(module: Any, forward: bool) -> None:
        nonlocal last, begun
        # A recomputed block is fetched twice.
        if z3_leaf_module(module) and module is not last:
            before, begun, last = begun, new_event(), module
            begun.record()
            before.synchronize()
        fetch(module, forward)

    coordinator.fetch_sub_module = fetch_when_begun


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function by `wrapper(function)`, once in a process."""
    function = getattr(owner, name)
    done = getattr(function, "wrappers", ())
    if wrapper not in done:
        wrapped: Any = wraps(function)(wrapper(function))
        wrapped.wrappers = (*done, wrapper)
        setattr(owner, name, wrapped)


def _outside_dispatch_modes(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose operators are not seen by the modes of selective checkpointing."""

    def call(*args: Any) -> None:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            hook(*args)

    return call


def _gathering_too(register: Callable[..., None]) -> Callable[..., None]:
    def call(module: torch.nn.Module, parameter: Any) -> None:
        register(module, parameter)
        _outside_dispatch_modes(parameter.all_gather)()

    return call


def _with_an_empty_stack(hook: Callable[..., None]) -> Callable[..., None]:
    from deepspeed.runtime.zero import parameter_offload

    def call(self: Any, module: torch.nn.Module) -> None:
        if module is self.module:
            del parameter_offload.FWD_MODULE_STACK[1:]  # the first is the model itself
        hook(self, module)

    return call


def _counting_external(construct: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(self: Any) -> None:
        construct(self)
        modules = self._PartitionedParameterCoordinator__submodule_order
        self.external_when_recorded = {id(each): _num_external(each) for each in modules}

    return call


def _invalidating_on_external(prologue: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any, module: torch.nn.Module) -> None:
        prologue(self, module)
        if not self.is_complete_trace():
            return
        if self.external_when_recorded[id(module)] != _num_external(module):
            self._invalidate_trace()

    return call


def _num_external(module: torch.nn.Module) -> int:
    return len(getattr(module, "_external_params", ()))


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if bias is not None and input.dim() == 2:
        return torch.addmm(bias, input, weight.t())
    output = input.matmul(weight.t())
    return output if bias is None else output + bias
