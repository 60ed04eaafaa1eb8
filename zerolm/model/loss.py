"""The loss of each token of a micro-batch; the same definition for training and evaluation."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from zerolm.model.architecture import router_loss_coefficient
from zerolm.model.chunked_loss import find_chunked_head
from zerolm.model.document_mask import isolating_inputs, isolating_masks

IGNORED = -100  # target of a position without loss; the convention of torch and Hugging Face


def token_losses(
    model: Any, batch: dict[str, torch.Tensor], observe: Callable[[Any], None] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model on a micro-batch and return the loss of each token.

    The sum of these, divided once by the number of targets in the GLOBAL batch, gives the same loss
    and gradient for any split into ranks and micro-batches. A mean of means does not, if rows
    differ in their number of targets. A `ChunkedHead` gives the same losses.

    Args:
        model: a causal LM or a DeepSpeed engine around one.
        batch: `input_ids` and `targets`, (B, T) int64; targets are shifted, and `IGNORED` where
            there is no loss. With `document_ids` and `position_ids` (B, T), attention is within
            documents only (`zerolm.model.document_mask`); with `position_ids` only, rows are slices
            of sequences (`zerolm.distributed.ulysses`).
        observe: called with the model's output.

    Returns:
        (B, T) float32 cross-entropies, 0 where ignored; and the weighted auxiliary loss of the
        routers if the config has `output_router_logits`, otherwise None.
    """
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
    inner = getattr(model, "module", model)
    if "document_ids" in batch:
        inputs |= isolating_inputs(batch, inner)
    elif "position_ids" in batch:  # slices of sequences
        inputs["position_ids"] = batch["position_ids"]
    if head := find_chunked_head(inner):  # never holds all logits of the micro-batch
        with isolating_masks(batch, inner), head.computing_losses(batch["targets"], IGNORED):
            outputs = model(**inputs)
        losses = outputs.logits.squeeze(-1)
    else:
        with isolating_masks(batch, inner):
            outputs = model(**inputs)
        losses = functional.cross_entropy(
            outputs.logits.float().flatten(0, 1),
            batch["targets"].flatten(),
            ignore_index=IGNORED,
            reduction="none",
        ).view_as(batch["targets"])
    if observe is not None:
        observe(outputs)
    auxiliary = getattr(outputs, "aux_loss", None)
    if auxiliary is not None:
        auxiliary = auxiliary * (router_loss_coefficient(inner.config) or 0.0)
    return losses, auxiliary


def sums_by_source(
    losses_BT: torch.Tensor, batch: dict[str, torch.Tensor], num_sources: int
) -> torch.Tensor:
    """Return loss sums and target counts by source, (2, S) float64, without gradient.

    Uses a matrix product, because `index_add_` is not deterministic on a GPU.
    """
    membership_SB = functional.one_hot(batch["sources"], num_sources).T.double()
    counted_B = (batch["targets"] != IGNORED).sum(1)
    return torch.stack(
        [
            membership_SB @ losses_BT.detach().double().sum(1),
            membership_SB @ counted_B.double(),
        ]
    )
