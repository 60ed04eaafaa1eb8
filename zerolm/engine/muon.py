"""Selects the parameters that DeepSpeed's Muon updates; 0.19.8 tags them before building the
optimizer.

zerolm/ds_config/muon.py decides which parameters to tag.
"""

import importlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zerolm.engine import replaced
from zerolm.engine.parameters import num_values


@contextmanager
def leaving_to_adamw(parameters: Sequence[Any]) -> Iterator[None]:
    """Make `deepspeed.initialize` tag all matrices for Muon except these parameters.

    DeepSpeed itself excludes only parameters with "embed" or "lm_head" in their names. So Muon
    would also update GPT-2's `wte` and `wpe`, and two-dimensional biases.
    """
    import deepspeed

    original = deepspeed.set_optimizer_flags

    def tag(config_class: Any, model: Any) -> None:
        original(config_class, model)
        for parameter in parameters:
            parameter.use_muon = False

    with replaced.installed(deepspeed, "set_optimizer_flags", tag):
        yield


def import_uncompiled() -> None:
    """Import DeepSpeed's Muon, for a run with another optimizer, without torch's compiler.

    DeepSpeed asks every optimizer whether it is Muon. Its decorators then import torch._inductor,
    which takes a second; here a function is compiled when it is first called.
    """
    from deepspeed.runtime import compiler

    decorate = compiler.compile()

    def decorator() -> Callable[[Any], Any]:
        return lambda function: lambda *args, **named: decorate(function)(*args, **named)

    with replaced.installed(compiler, "compile", decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def scale_by_layout(transposed: Collection[tuple[int, ...]]) -> None:
    """Make Muon scale each matrix by its outputs and inputs, wherever these are in its shape.

    DeepSpeed multiplies an orthogonalized update by sqrt(max(1, rows / columns)), which is Jordan's
    rule for matrices of shape (out, in). The orthogonalization itself does not depend on which of
    the two dimensions is first. Replaces DeepSpeed's function permanently.

    Args:
        transposed: the shapes of the tensors whose matrices are (in, out).
    """
    from deepspeed.runtime.zero.muon import original_muon

    original = getattr(original_muon.muon_update, "original", original_muon.muon_update)

    def muon_update(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        update = original(gradient, *args, **kwargs)
        inputs, outputs = gradient.shape[-2:]
        is_transposed = tuple(gradient.shape) in transposed
        return update * math.sqrt(outputs / inputs) if is_transposed else update

    muon_update.original = original  # type: ignore[attr-defined]
    replaced.install(original_muon, "muon_update", muon_update)


def describe(model: Any) -> str:
    """Describe how many parameters Muon and AdamW update."""
    counts, values = {True: 0, False: 0}, {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.use_muon] += 1
        values[parameter.use_muon] += num_values(parameter)
    return (
        f"Muon: {counts[True]} matrix tensors with {values[True]:,} values; AdamW: the "
        f"{counts[False]} other tensors with {values[False]:,}"
    )


def uses_muon(optimizer: Any) -> bool:
    """Return whether ZeRO's optimizer with flat buffers wraps Muon (possible since 0.19.8)."""
    return getattr(optimizer, "_uses_muon", False)
