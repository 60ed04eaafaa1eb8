"""torch.compile for each block of a model by itself, under every ZeRO stage.

The blocks of a decoder are alike, so that one graph serves all of them: it is made once, however
deep the model, and what is between the blocks (embeddings, the head with its chunks of logits, the
mask) stays as it is. Under ZeRO-3 a block is a leaf: DeepSpeed gathers all its weights before it
and lets them go after it, so that no hook stands inside of the graph. Compiled whole, a model of
ZeRO-3 falls into a piece for each of its linear layers. Only training is compiled.

Names of parameters do not change: checkpoints of compiled runs and of others are the same.
"""

import importlib.util
import inspect
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

# Graphs of one block that torch keeps before it gives up and runs it uncompiled: a model may have
# blocks of several kinds, each in training with and without a sequence of another length.
GRAPHS = 64


def blocks_of(model: "nn.Module") -> list["nn.Module"]:
    """Return the decoder's blocks: the longest list of layers that Transformers can checkpoint."""
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and all(isinstance(one, GradientCheckpointingLayer) for one in module)
    ]
    return max(lists, key=len, default=[])


def compilers() -> tuple[str, ...]:
    """Return the names that torch looks for a C++ compiler by."""
    return (*filter(None, [os.environ.get("CXX")]), "g++", "clang++", "c++")


def obstacle(config: "PretrainedConfig", device: str) -> str | None:
    """Say why a model cannot be compiled on a device, None if nothing speaks against it.

    Args:
        device: kind of the ranks' devices, `absent` when they are not here.
    """
    from zerolm.model.architecture import meta_model

    if device == "cpu" and not any(map(shutil.which, compilers())):
        return "there is no C++ compiler, which it needs on a CPU"
    if device not in ("cpu", "absent") and importlib.util.find_spec("triton") is None:
        return "there is no package triton, which it needs on a GPU"
    model = meta_model(config)
    return None if blocks_of(model) else f"{type(model).__name__} has no list of blocks"


def prepare(model: "nn.Module", zero_stage: int) -> None:
    """Before `deepspeed.initialize`: keep ZeRO-3's hooks outside of the blocks."""
    if zero_stage == 3:
        from deepspeed.utils import set_z3_leaf_module

        for block in blocks_of(model):
            set_z3_leaf_module(block, True)


def compile_blocks(model: "nn.Module") -> str:
    """Compile the forward of each block, inside of its hooks; return what to say about it.

    After `deepspeed.initialize`. The first step makes the graphs, which takes from seconds to
    minutes; torch keeps them on disk.
    """
    import torch

    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    blocks: list[Any] = blocks_of(model)
    for block in blocks:
        recorders = take_recorders(model, block)
        block.forward = _compiled(block, recorders) if recorders else torch.compile(block.forward)
    kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
    return f"compile: {len(blocks)} blocks ({kinds}), each by itself; the first step takes longer"


def take_recorders(model: Any, block: "nn.Module") -> list[tuple[Any, Any]]:
    """Take transformers' hooks out of a block that record the outputs of modules inside.

    They look into a ContextVar, at which a graph breaks. Those of attention weights, which nobody
    asks for, are dropped.

    Returns:
        Routers with their hooks, where the model returns the routers' logits.
    """
    from transformers.utils import output_capturing

    # They come with the first forward pass, once for each model inside of a model.
    output_capturing.maybe_install_capturing_hooks(model.base_model)
    model._output_capturing_hooks_installed = True
    wanted = getattr(model.config.get_text_config(), "output_router_logits", False) is True
    found = []
    for module in block.modules():
        for number, hook in list(module._forward_hooks.items()):
            inside = getattr(hook, "__qualname__", "").startswith("install_output_capuring_hook")
            if not inside or module is block:
                continue
            del module._forward_hooks[number]
            key = inspect.getclosurevars(hook).nonlocals["key"]
            if wanted and key == "router_logits":
                found.append((module, hook))
    return found


def _compiled(block: Any, recorders: list[tuple[Any, Any]]) -> Any:
    """Compile a block's forward so that its routers' outputs leave the graph beside its own."""
    import torch

    original = block.forward
    for module, _ in recorders:
        module.register_forward_hook(_keep)

    def forward_and_routers(*words: Any, **more: Any) -> Any:
        output = original(*words, **more)
        return output, [module._kept for module, _ in recorders]

    # Inside of gradient checkpointing: what is kept is of the forward pass alone.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    compiled = torch.compile(forward_and_routers)

    def forward(*words: Any, **more: Any) -> Any:
        output, kept = compiled(*words, **more)
        for (module, hook), own in zip(recorders, kept, strict=True):
            module._kept = None
            hook(module, (), own)
        return output

    return forward


def _keep(module: Any, words: Any, output: Any) -> None:
    module._kept = output


def breaks() -> str | None:
    """Say where graphs were broken so far, None if nowhere."""
    from torch._dynamo.utils import counters

    found = counters["graph_break"]
    if not found:
        return None
    reasons = sorted({str(reason).strip().splitlines()[0] for reason in found})
    return f"compile: blocks are in pieces, which is slower: {'; '.join(reasons)}"


@contextmanager
def eager() -> Iterator[None]:
    """Leave out torch.compile: another shape or mode would be another graph, with other bits."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield
