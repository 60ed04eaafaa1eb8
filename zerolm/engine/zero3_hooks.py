"""Changes to DeepSpeed 0.19.8's hooks that gather and release weights under ZeRO-3.

The hooks record the order in which modules run, and prefetch in that order in later passes.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from zerolm.engine import replaced


def mark_leaf_modules(model: torch.nn.Module, names: dict[str, Any]) -> list[torch.nn.Module]:
    """Mark the modules that `zero_optimization.leaf_module` names, as DeepSpeed does; return them.

    DeepSpeed gathers all weights of a leaf module at once.
    """
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config

    marked: list[torch.nn.Module] = apply_zero_leaf_module_config(
        model, DeepSpeedZeroLeafModuleConfig(**names)
    )
    return marked


def fit_zero3_to_recomputation() -> None:
    """Change DeepSpeed permanently so that recomputed activations equal those of the forward pass.

    - Make its linear function add biases out of place. By default, it adds them in place to the
    matmul's output, which `selective` keeps. This happens inside an autograd function, where torch
    does not notice that the kept tensor changes, so the recomputation would add the bias a second
    time.
    - Hide the hooks' operators from `selective`, which requires that a block runs the same
    operators in the forward pass and in the recomputation. Which operators the hooks run depends
    on the weights already gathered: persistent ones after a load, prefetched ones, and those left
    over from an evaluation before the first step.
    - Empty the hooks' stack of running modules whenever the model starts. A recomputation ends with
    an exception as soon as it has recomputed the needed tensors, which leaves a few modules on the
    stack for each block and micro-batch.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    replaced.install(LinearFunctionForZeroStage3, "forward", staticmethod(_linear))
    offload = parameter_offload.DeepSpeedZeRoOffload
    _wrap(offload, "pre_sub_module_forward_function", _outside_dispatch_modes)
    _wrap(offload, "post_sub_module_forward_function", _outside_dispatch_modes)
    _wrap(offload, "pre_sub_module_forward_function", _with_an_empty_stack)
    _wrap(parameter_offload, "register_external_parameter", _gathering_too)


def follow_external_parameters() -> None:
    """Change DeepSpeed permanently so that a module may read its children's weights in any pass.

    The mixers of Mamba-2 and Qwen3-Next read a convolution's weight instead of calling the
    convolution. If the weight is not gathered, DeepSpeed adds it to the weights that it gathers
    for the mixer, but the recorded order lacks it: "tracing error at step". This happens if the
    weight was gathered in the process's first pass (as after a load), but all weights were
    released before a later one (as when a step is recomputed). This change makes DeepSpeed record
    the order again in that case.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    coordinator = PartitionedParameterCoordinator
    _wrap(coordinator, "construct_parameter_trace_from_module_trace", _counting_external)
    _wrap(coordinator, "trace_prologue", _invalidating_on_external)


def leave_partitions_out_of_graphs() -> None:
    """Stop DeepSpeed's linear function from checking in a graph whether a weight is partitioned.

    The check is unnecessary, because all weights of a compiled block are gathered. With the check,
    torch 2.11 would compile a graph for each block, since it guards on the `ds_id` of the first
    block's weight.
    """
    import torch
    from deepspeed.runtime.zero import linear, partition_parameters

    def is_zero_param(parameter: Any) -> bool:
        return not torch.compiler.is_compiling() and partition_parameters.is_zero_param(parameter)

    replaced.install(linear, "is_zero_param", is_zero_param)


def bound_gathers(engine: Any, new_event: Callable[[], Any] = torch.cuda.Event) -> None:
    """Make the host gather a block and the following ones only once the previous block has begun.

    Launching a block takes much less time than running it, and memory in use by one stream is not
    reused by another. So a host that runs ahead would gather the weights of many blocks.

    Args:
        engine: a ZeRO-3 engine on CUDA, with blocks as leaf modules.
        new_event: replaced in tests.
    """
    from deepspeed.utils import z3_leaf_module

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    fetch = coordinator.fetch_sub_module
    last: Any = None
    begun = new_event()
    begun.record()

    def fetch_when_begun(module: Any, forward: bool) -> None:
        nonlocal last, begun
        # a recomputed block is fetched twice
        if z3_leaf_module(module) and module is not last:
            before, begun, last = begun, new_event(), module
            begun.record()
            before.synchronize()
        fetch(module, forward)

    replaced.install(coordinator, "fetch_sub_module", fetch_when_begun)


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function with `wrapper(function)`, only once per process."""
    function = getattr(owner, name)
    done = getattr(function, "wrappers", ())
    if wrapper not in done:
        wrapped: Any = wraps(function)(wrapper(function))
        wrapped.wrappers = (*done, wrapper)
        replaced.install(owner, name, wrapped)


def _outside_dispatch_modes(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that runs outside the dispatch modes of selective checkpointing."""

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
            del parameter_offload.FWD_MODULE_STACK[1:]  # the first entry is the model itself
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
