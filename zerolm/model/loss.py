"""From a micro-batch to the loss of each token: one definition for training and evaluation."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from zerolm.model.chunked_loss import head_of
from zerolm.model.document_mask import isolating_inputs

IGNORED = -100  # the target of a position that has no loss; torch's and Hugging Face's convention


def token_losses(
    model: Any, batch: dict[str, torch.Tensor], observe: Callable[[Any], None] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model on a micro-batch and return the loss of each token.

    Sums of these, divided once by the number of targets in the GLOBAL batch, give the same loss and
    gradient however the batch was cut into ranks and micro-batches. A mean of means does not, as
    soon as rows differ in how many targets they have. A `ChunkedHead` gives the same losses.

    Args:
        model: a causal LM or a DeepSpeed engine around one.
        batch: `input_ids` and `targets`, (B, T) int64, targets already shifted and `IGNORED` where
            there is no loss; with `document_ids` and `position_ids` (B, T) attention stays inside
            each document, see `zerolm.model.document_mask`; with `position_ids` alone the rows are
            parts of sequences, see `zerolm.distributed.ulysses`.
        observe: is shown what the model returns.

    Returns:
        (B, T) float32 cross-entropies, 0 where ignored; and the router's auxiliary loss, already
        weighted, of a mixture of experts that asks for it (`output_router_logits`), else None.
    """
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
    inner = getattr(model, "module", model)
    if "document_ids" in batch:
        inputs |= isolating_inputs(batch, inner)
    elif "position_ids" in batch:  # of a part of a sequence
        inputs["position_ids"] = batch["position_ids"]
    if head := head_of(inner):  # the logits of the micro-batch are never there as a whole
        with head.gives_losses(batch["targets"], IGNORED):
            outputs = model(**inputs)
        losses = outputs.logits.squeeze(-1)
    else:
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
        auxiliary = auxiliary * router_coefficient(inner.config)
    return losses, auxiliary


def router_coefficient(config: Any) -> float:
    """Return the weight of the router's auxiliary loss, which DBRX keeps in a part of its own."""
    if hasattr(config, "router_aux_loss_coef"):
        return config.router_aux_loss_coef
    return config.ffn_config.moe_loss_weight


def sums_by_source(
    losses_BT: torch.Tensor, batch: dict[str, torch.Tensor], num_sources: int
) -> torch.Tensor:
    """Return the loss sums and the target counts of each source, (2, S) float64, no gradient.

    A matrix product and not `index_add_`, whose order of addition on a GPU changes from run to run.
    """
    membership_SB = functional.one_hot(batch["sources"], num_sources).T.double()
    counted_B = (batch["targets"] != IGNORED).sum(1)
    return torch.stack(
        [
            membership_SB @ losses_BT.detach().double().sum(1),
            membership_SB @ counted_B.double(),
        ]
    )
