"""torch.compile of each decoder block and of the loss, under every ZeRO stage, for training only.

The blocks are alike, so one graph, compiled once, serves a model of any depth. The loss is a graph
from logits to losses, without weights; the rest (embeddings, the head with its chunked logits, the
mask) is not compiled. Under ZeRO-3 each block is
a leaf module: DeepSpeed gathers all its weights before it and releases them after it, so the graph
contains no hooks. Compiled as a whole, a ZeRO-3 model has a graph break at each linear layer.

Parameter names do not change, so compiled and uncompiled runs can load each other's checkpoints.
"""

import inspect
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import RecordError
from zerolm.common.files import write_json
from zerolm.common.locks import FileLock
from zerolm.common.machine import compile_problem
from zerolm.common.records import read_record

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

# Graphs per function before torch falls back to eager: a model may have several kinds of blocks,
# each with several sequence lengths.
MAX_GRAPHS = 64
_eager = False  # inside `eager`
CHECKSUMS = "zerolm-checksums.json"  # {path of a library below the cache: its CRC-32}


def decoder_blocks(model: "nn.Module") -> list["nn.Module"]:
    """Return the decoder blocks: the longest list of layers with checkpointing in transformers."""
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and all(isinstance(one, GradientCheckpointingLayer) for one in module)
    ]
    return max(lists, key=len, default=[])


def unsupported_reason(config: "PretrainedConfig", device: str) -> str | None:
    """Return why a model cannot be compiled on a device, or None.

    Args:
        device: device type of the ranks; `absent` if they are on other machines.
    """
    from zerolm.model.architecture import meta_model

    if device != "absent" and (why := compile_problem(device)):
        return why
    model = meta_model(config)
    return None if decoder_blocks(model) else f"{type(model).__name__} has no list of blocks"


# ---- Compiled libraries in torch's cache on a CPU


def remove_damaged_libraries() -> None:
    """Remove libraries that are truncated, or that have changed since `record_libraries`.

    torch loads a library without a check. One that a kill, a full disk or a failing disk has
    damaged fails at each start, ends the process with a signal, or computes something else. If it
    is one with which torch finds out what the CPU can do, torch compiles for an older CPU, which
    rounds differently.

    The first rank of each host calls this before anything is compiled. It prints what it removed.
    """
    cache, recorded = _cache_directory(), _recorded_checksums()
    removed = []
    for path in cache.glob("*/*.so"):
        checksum = recorded.get(str(path.relative_to(cache)))
        with suppress(OSError):  # locked: being written; or removed meanwhile
            if _is_damaged(path, checksum):
                with FileLock(cache / "locks" / f"{path.name.partition('.')[0]}.lock"):
                    if _is_damaged(path, checksum):
                        path.unlink()
                        removed.append(str(path.relative_to(cache)))
    if removed:
        with suppress(OSError):
            left = {name: value for name, value in recorded.items() if name not in removed}
            write_json(cache / CHECKSUMS, left, many_writers=True)
        print(
            f"compile: removed {len(removed)} damaged libraries from {cache}; they are compiled "
            f"again",
            flush=True,
        )


def record_libraries() -> None:
    """Record the checksums of libraries that have none yet.

    The first rank of each host calls this after its first step, with which they have worked.
    """
    cache, recorded = _cache_directory(), _recorded_checksums()
    checksums = {}
    for path in sorted(cache.glob("*/*.so")):
        name = str(path.relative_to(cache))
        with suppress(OSError):
            checksums[name] = recorded[name] if name in recorded else _library_checksum(path)
    if checksums != recorded:
        with suppress(OSError):
            write_json(cache / CHECKSUMS, checksums, many_writers=True)


def is_truncated(path: Path) -> bool:
    """Return whether a shared library ends before its section headers do, its last part."""
    with open(path, "rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":  # of 64 bits
            return len(header) < 64 or header[:4] != b"\x7fELF"
        (start,) = struct.unpack_from("=Q", header, 0x28)
        size, count = struct.unpack_from("=HH", header, 0x3A)
        return os.fstat(file.fileno()).st_size < start + size * count


def _is_damaged(path: Path, checksum: int | None) -> bool:
    return is_truncated(path) or (checksum is not None and _library_checksum(path) != checksum)


def _library_checksum(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _recorded_checksums() -> dict[str, int]:
    with suppress(RecordError):
        return read_record(_cache_directory() / CHECKSUMS, dict[str, int]) or {}
    return {}


def _cache_directory() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


# ---- Compilation


def mark_leaf_modules(model: "nn.Module", zero_stage: int) -> None:
    """Keep ZeRO-3's hooks out of the blocks; call before `deepspeed.initialize`."""
    if zero_stage == 3:
        from deepspeed.utils import set_z3_leaf_module

        for block in decoder_blocks(model):
            set_z3_leaf_module(block, True)


def compile_blocks(model: "nn.Module") -> str:
    """Compile the forward of each block, inside its hooks, and the loss; return a line to print.

    Call after `deepspeed.initialize`. The first step compiles, which takes seconds to minutes;
    torch caches the graphs on disk.
    """
    import torch

    from zerolm.model import compiled_attention
    from zerolm.model.loss import COMPILED_LOSS, cross_entropies

    torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    blocks: list[Any] = decoder_blocks(model)
    for block in blocks:
        recorders = remove_output_recorders(model, block)
        block.forward = _with_routers(block, recorders) if recorders else _compiled(block.forward)
    if next(model.parameters()).device.type == "cpu":
        compiled_attention.install()
    setattr(model, COMPILED_LOSS, _compiled(cross_entropies))
    kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
    return f"compile: {len(blocks)} blocks ({kinds}); the first step takes longer"


def remove_output_recorders(model: Any, block: "nn.Module") -> list[tuple[Any, Any]]:
    """Remove transformers' hooks that record outputs of modules inside a block.

    They read a ContextVar, which breaks the graph. The recorders of attention weights are not used
    in training and are dropped.

    Returns:
        (router, hook) of each router, if the model returns router logits; otherwise empty.
    """
    from transformers.utils import output_capturing

    # Otherwise transformers installs them in the first forward pass.
    output_capturing.maybe_install_capturing_hooks(model.base_model)
    model._output_capturing_hooks_installed = True
    returns_logits = getattr(model.config.get_text_config(), "output_router_logits", False) is True
    routers = []
    for module in block.modules():
        for number, hook in list(module._forward_hooks.items()):
            # The misspelling is transformers'.
            recorder = getattr(hook, "__qualname__", "").startswith("install_output_capuring_hook")
            if not recorder or module is block:
                continue
            del module._forward_hooks[number]
            key = inspect.getclosurevars(hook).nonlocals["key"]
            if returns_logits and key == "router_logits":
                routers.append((module, hook))
    return routers


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function; it runs uncompiled inside `eager`."""
    import torch

    compiled = torch.compile(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _eager else compiled)(*args, **kwargs)

    return call


def _with_routers(block: Any, recorders: list[tuple[Any, Any]]) -> Any:
    """Compile a block's forward so that the graph also returns its routers' outputs."""
    import torch

    original = block.forward
    for module, _ in recorders:
        module.register_forward_hook(_store_output)

    def forward_with_routers(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return output, [module._stored_output for module, _ in recorders]

    # Under gradient checkpointing, do not store outputs again in the recomputation.
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
    module._stored_output = output


def graph_break_notice() -> str | None:
    """Return a notice of all graph breaks so far, or of too many graphs; None without either."""
    from torch._dynamo.utils import counters

    reasons = sorted({str(reason).strip().splitlines()[0] for reason in counters["graph_break"]})
    if reasons:
        return f"compile: graph breaks make the blocks slower: {'; '.join(reasons)}"
    if (count := counters["stats"]["unique_graphs"]) >= MAX_GRAPHS:
        return (
            f"compile: {count} graphs so far: beyond {MAX_GRAPHS} of a function, blocks run eagerly"
        )
    return None


@contextmanager
def eager() -> Iterator[None]:
    """Run blocks and loss uncompiled: other shapes and modes need graphs that round differently.

    What transformers compiles by itself stays compiled: flex_attention would hold all scores.
    """
    global _eager
    before, _eager = _eager, True
    try:
        yield
    finally:
        _eager = before
