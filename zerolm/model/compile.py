"""torch.compile for each decoder block and the loss, at every ZeRO stage, only in training.

All blocks are alike, so one compiled graph suffices for a model of any depth. The loss is another
graph, from logits to losses, without weights. The rest (embeddings, the head with its chunked
logits, the mask) is not compiled. Under ZeRO-3, each block is a leaf module: DeepSpeed gathers all
its weights before it runs and releases them afterwards, so the graph contains no hooks. If compiled
as a whole, a ZeRO-3 model has a graph break at each linear layer.

Parameter names do not change, so compiled and uncompiled runs can load each other's checkpoints.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerolm.common.machine import compile_problem
from zerolm.common.remembered import recall
from zerolm.engine import replaced
from zerolm.model.architecture import ConfigKey, decoder_blocks, meta_model

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

# Maximum number of graphs per function before torch falls back to eager: a model may have several
# types of blocks, each with several sequence lengths.
MAX_GRAPHS = 64
# Why the exchange of divided experts is left out of all graphs, as torch reports it.
UNCOMPILED = "zerolm: numbers of rows are known only while it runs"
_eager = False  # inside `eager`


def unsupported_reason(config: "PretrainedConfig", device: str) -> str | None:
    """Return why a model cannot be compiled on a type of device (as in `Device`), or None if it
    can.
    """
    if device != "absent" and (why := compile_problem(device)):
        return why

    def reason() -> str | None:
        model = meta_model(config)
        return None if decoder_blocks(model) else f"{type(model).__name__} has no list of blocks"

    return recall("compilation", ConfigKey.of(config).inputs(), reason)


# ---- Compilation


def compile_blocks(model: "nn.Module") -> str:
    """Compile the loss and each block's forward, inside the block's hooks; return a line for rank 0
    to print.

    Call after `deepspeed.initialize`. The first step compiles, which takes seconds to minutes;
    torch caches the graphs on disk.
    """
    import torch

    from zerolm.model import compiled_attention
    from zerolm.model.loss import COMPILED_LOSS, cross_entropies
    from zerolm.model.stages import own_blocks, stage_of

    torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    blocks: list[Any] = own_blocks(model)
    for block in blocks:
        recorders = remove_output_recorders(model, block)
        forward = _with_routers(block, recorders) if recorders else _compiled(block.forward)
        replaced.install(block, "forward", forward)
    if next(model.parameters()).device.type == "cpu":
        compiled_attention.install()
    setattr(model, COMPILED_LOSS, _compiled(cross_entropies))
    kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
    where = "" if stage_of(model) is None else " on the first stage"
    return f"compile: {len(blocks)} blocks ({kinds}){where}; the first step takes longer"


def remove_output_recorders(model: Any, block: "nn.Module") -> list[tuple[Any, Any]]:
    """Remove transformers' hooks that record outputs of modules inside a block.

    The hooks read a ContextVar, which breaks the graph. Hooks that record attention weights are not
    used in training and are dropped.

    Returns:
        A list of (router, hook) if the model returns router logits; otherwise an empty list.
    """
    from transformers.utils import output_capturing

    # Otherwise, transformers would install them in the first forward pass.
    output_capturing.maybe_install_capturing_hooks(model.base_model)
    model._output_capturing_hooks_installed = True
    returns_logits = getattr(model.config.get_text_config(), "output_router_logits", False) is True
    routers = []
    for module in block.modules():
        for number, hook in list(module._forward_hooks.items()):
            # The misspelling is in transformers.
            recorder = getattr(hook, "__qualname__", "").startswith("install_output_capuring_hook")
            if not recorder or module is block:
                continue
            del module._forward_hooks[number]
            key = inspect.getclosurevars(hook).nonlocals["key"]
            if returns_logits and key == "router_logits":
                routers.append((module, hook))
    return routers


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled version of a function, which runs uncompiled inside `eager`."""
    import torch

    compiled = torch.compile(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _eager else compiled)(*args, **kwargs)

    return call


def _with_routers(block: Any, recorders: list[tuple[Any, Any]]) -> Any:
    """Compile a block's forward into a graph that also returns its routers' outputs."""
    import torch

    original = block.forward
    for module, _ in recorders:
        module.register_forward_hook(_store_output)

    def forward_with_routers(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return output, [module._stored_output for module, _ in recorders]

    # With gradient checkpointing, do not store outputs again during recomputation.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    compiled = _compiled(forward_with_routers)

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, router_outputs = compiled(*args, **kwargs)
        for (module, hook), router_output in zip(recorders, router_outputs, strict=True):
            module._stored_output = None
            hook(module, (), router_output)
        return output

    return forward


def _store_output(module: Any, args: Any, output: Any) -> None:
    # Use views: torch 2.13 cannot return an autograd function's output, such as DeepSpeed's
    # product with gathered weights, from the graph of a checkpointed region.
    if isinstance(output, tuple):
        module._stored_output = tuple(each.view(each.shape) for each in output)
    else:
        module._stored_output = output.view(output.shape)


def graph_break_notice() -> str | None:
    """Return a notice about all graph breaks so far, except those for divided experts, or about too
    many graphs, or None if there were neither.
    """
    from torch._dynamo.utils import counters

    texts = [each for each in map(str, counters["graph_break"]) if UNCOMPILED not in each]
    reasons = sorted({text.strip().splitlines()[0] for text in texts})
    if reasons:
        return f"compile: graph breaks make the blocks slower: {'; '.join(reasons)}"
    if (count := counters["stats"]["unique_graphs"]) >= MAX_GRAPHS:
        return (
            f"compile: {count} graphs so far: beyond {MAX_GRAPHS} per function, blocks run eagerly"
        )
    return None


@contextmanager
def eager() -> Iterator[None]:
    """Inside this context, run the blocks and the loss uncompiled, because other shapes and modes
    need graphs that round differently.

    Functions that transformers compiles stay compiled, because flex_attention would otherwise
    materialize all scores.
    """
    global _eager
    before, _eager = _eager, True
    try:
        yield
    finally:
        _eager = before
