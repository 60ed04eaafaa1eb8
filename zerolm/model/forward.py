"""All forward passes of a run: training, evaluation, probes and sampling call the model only here.

A form of parallelism in which no rank has the whole model concerns these functions alone.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from zerolm.model.architecture import router_loss_coefficient
from zerolm.model.chunked_loss import find_chunked_head
from zerolm.model.document_mask import isolating_inputs, isolating_masks
from zerolm.model.loss import COMPILED_LOSS, IGNORED, cross_entropies

# The first name is for transformers 5.24 and later, whose Mamba accepts but ignores the older name;
# the second is for earlier versions.
CACHE_NAMES = ("cache", "past_key_values")


def token_losses(
    model: Any, batch: dict[str, torch.Tensor], observe: Callable[[Any], None] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model on a micro-batch and return the loss of each token.

    The sum of the losses, divided once by the number of targets in the GLOBAL batch, gives the
    same loss and gradient for any split into ranks and micro-batches. A mean of means would not if
    rows have different numbers of targets. A `ChunkedHead` returns the same losses.

    Args:
        model: a causal LM or a DeepSpeed engine around one.
        batch: `input_ids` and `targets`, (B, T) int64; targets are shifted, and `IGNORED` at
            positions without loss. With `document_ids` and `position_ids` (B, T) and `boundaries`,
            attention is within documents only (`zerolm.model.document_mask`); with only
            `position_ids`, rows are slices of sequences (`zerolm.distributed.ulysses`).
        observe: called with the model's output.

    Returns:
        The float32 cross-entropies, (B, T), 0 where ignored; and the routers' weighted auxiliary
        loss, or None if the config does not set `output_router_logits`.
    """
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
    inner = getattr(model, "module", model)
    if router_loss_coefficient(inner.config) is not None:
        inputs["output_router_logits"] = True  # JetMoE ignores its config in transformers 5.17
    if "position_ids" in batch:  # slices of sequences, or documents
        inputs["position_ids"] = batch["position_ids"]
    inputs |= isolating_inputs(batch, inner)
    if head := find_chunked_head(inner):  # never stores all logits of the micro-batch
        with isolating_masks(batch, inner), head.computing_losses(batch["targets"], IGNORED):
            outputs = model(**inputs)
        losses = outputs.logits[..., 0]
    else:
        with isolating_masks(batch, inner):
            outputs = model(**inputs)
        of_logits = getattr(inner, COMPILED_LOSS, cross_entropies)
        losses = of_logits(outputs.logits, batch["targets"])
    if observe is not None:
        observe(outputs)
    auxiliary = getattr(outputs, "aux_loss", None)
    if auxiliary is not None:
        auxiliary = auxiliary * (router_loss_coefficient(inner.config) or 0.0)
    return losses, auxiliary


def next_logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits of the token after each of these, (B, T, V), as an exported model does."""
    logits_BTV: torch.Tensor = model(input_ids=ids_BT, use_cache=False).logits
    return logits_BTV


def continued_logits(
    model: Any, ids_BT: torch.Tensor, cache: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the logits after tokens that follow the cached ones, and the cache with these tokens.

    The cache is empty before the first tokens, and always if the model has none.
    """
    outputs = model(input_ids=ids_BT, use_cache=True, **cache)
    # Newer versions warn of the older name, so it is not read if the first one is there.
    kept = (name for name in CACHE_NAMES if getattr(outputs, name, None) is not None)
    return outputs.logits, {name: getattr(outputs, name) for name in islice(kept, 1)}
