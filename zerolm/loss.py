"""The loss of each token, in float32. One definition for training, evaluation and every profile."""

import torch
from torch.nn import functional

IGNORED = -100  # the target of a position that has no loss; torch's and Hugging Face's convention


def token_losses(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each position, (B, T) float32, 0 where the target is ignored.

    Sums of these, divided once by the number of tokens in the GLOBAL batch, give the same loss and
    gradient however the batch was cut into ranks and micro-batches. A mean of means does not, as
    soon as rows differ in how many targets they have.

    Args:
        logits_BTV: (B, T, V), any float dtype.
        targets_BT: (B, T) int64, already shifted, `IGNORED` where there is no loss.
    """
    losses = functional.cross_entropy(
        logits_BTV.float().flatten(0, 1),
        targets_BT.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return losses.view_as(targets_BT)
