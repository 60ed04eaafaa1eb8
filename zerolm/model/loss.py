"""The loss of each token in a micro-batch, defined identically for training and evaluation."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from zerolm.model.chunked_loss import find_chunked_head

IGNORED = -100  # target at positions without loss, as in torch and Hugging Face
COMPILED_LOSS = "compiled_cross_entropies"  # model attribute: compiled `cross_entropies`


def cross_entropies(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token, as float32 of shape (B, T), 0 where ignored.

    The compiled function makes no float32 copy of the logits: it sums in float32, but reads and
    writes values in the logits' dtype. Evaluations are not compiled and return the results of
    torch's function.
    """
    if torch.compiler.is_compiling():
        losses_BT: torch.Tensor = _CrossEntropies.apply(logits_BTV, targets_BT)
        return losses_BT
    return functional.cross_entropy(
        logits_BTV.float().flatten(0, 1),
        targets_BT.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    ).view_as(targets_BT)


class _CrossEntropies(torch.autograd.Function):
    """Saves the logits unchanged and each token's log(Z), instead of all log-probabilities."""

    @staticmethod
    def forward(ctx: Any, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        counted_BT = targets_BT != IGNORED
        log_partitions_BT = logits_BTV.float().logsumexp(-1)
        of_targets_BT1 = logits_BTV.gather(-1, targets_BT.where(counted_BT, 0)[..., None])
        ctx.save_for_backward(logits_BTV, targets_BT, log_partitions_BT)
        losses_BT = log_partitions_BT - of_targets_BT1[..., 0].float()
        return losses_BT.where(counted_BT, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_BTV, targets_BT, log_partitions_BT = ctx.saved_tensors
        gradient_BT1 = gradients[0].where(targets_BT != IGNORED, 0.0)[..., None]
        probabilities_BTV = (logits_BTV.float() - log_partitions_BT[..., None]).exp()
        ids_V = torch.arange(logits_BTV.shape[-1], device=logits_BTV.device)
        is_target_BTV = ids_V == targets_BT[..., None]
        return ((probabilities_BTV - is_target_BTV.float()) * gradient_BT1).to(
            logits_BTV.dtype
        ), None


def divided(factor: float, targets: torch.Tensor | int) -> torch.Tensor | float:
    """Divide a factor for float32 losses by the number of targets in the global batch.

    A tensor stays on its device and is rounded in the same way as a number.
    """
    if isinstance(targets, int):
        return factor / targets
    return (factor / targets.double()).float()


def squared_log_partitions(
    model: Any, outputs: Any, batch: dict[str, torch.Tensor], losses_BT: torch.Tensor
) -> torch.Tensor:
    """Return log(Z)^2 for each target token, as float32 of shape (B, T), 0 where ignored.

    Z is the sum of the exponentials of a token's logits. Uses log Z = loss + logit of the target,
    which needs no further softmax. `outputs` is the argument of `observe`, and `losses_BT` the
    result of `zerolm.model.forward.token_losses`.
    """
    if find_chunked_head(getattr(model, "module", model)):
        squares: torch.Tensor = outputs.logits[..., 1]
        return squares
    counted = batch["targets"] != IGNORED
    targets = batch["targets"].where(counted, 0)
    target_logits = outputs.logits.gather(-1, targets[..., None])[..., 0].float()
    return (losses_BT + target_logits).where(counted, 0.0).square()


def choice_shares(
    router_logits: Sequence[torch.Tensor], loads: Sequence[Sequence[int]], top_k: int
) -> list[torch.Tensor]:
    """Return for each router the share of tokens that chose each expert, as float32 of shape (E,).

    Args:
        router_logits: one (N, E) tensor per router.
        loads: for each router, the number of tokens that chose each expert; empty before the first
            step, in which all shares are equal.
        top_k: number of experts chosen per token.
    """
    experts = [logits_NE.shape[-1] for logits_NE in router_logits]
    numbers = [number for load in loads for number in load] or [1] * sum(experts)
    counts = torch.tensor(numbers, dtype=torch.float64).split(experts)
    shares = torch.cat([(load * (top_k / load.sum())).float() for load in counts])
    return list(shares.to(router_logits[0].device, non_blocking=True).split(experts))


def expert_choices(scores_NE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the number of tokens that choose each expert, (E,) int64.

    Compares and sums, because `bincount` is not deterministic on a GPU.
    """
    num_experts = scores_NE.shape[-1]
    chosen = scores_NE.topk(min(top_k, num_experts), dim=-1).indices
    return (chosen.flatten()[:, None] == torch.arange(num_experts, device=chosen.device)).sum(0)


def pooled_choices(
    router_logits: Sequence[torch.Tensor], top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what transformers' router loss needs of some of a model's routers.

    Returns:
        The number of tokens that choose each expert, summed over the routers, and the number of
        rows, (E + 1,) int64; and the sum of the probabilities of each expert, (E,) float32.
    """
    scores = [logits_NE.softmax(-1) for logits_NE in router_logits]
    chosen_E = torch.stack([expert_choices(each.detach(), top_k) for each in scores]).sum(0)
    rows = torch.full_like(chosen_E[:1], sum(map(len, scores)))
    return torch.cat([chosen_E, rows]), torch.stack([each.float().sum(0) for each in scores]).sum(0)


def pooled_balance_loss(probabilities_E: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the part of some of a model's routers in transformers' router loss of a micro-batch.

    The loss is E * sum_i f_i * P_i, with the share f_i of tokens that choose expert i and its mean
    probability P_i, both over all rows of all routers. It is linear in P, so the parts add up to
    it.

    Args:
        probabilities_E, counts: results of `pooled_choices`; the counts are summed over all routers
            of the model.
    """
    chosen_E, rows = counts[:-1].float(), counts[-1].float()
    return len(chosen_E) * (chosen_E / rows * (probabilities_E / rows)).sum()


def balance_loss(
    router_logits: Sequence[torch.Tensor], shares: Sequence[torch.Tensor], tokens: int
) -> torch.Tensor:
    """Return this micro-batch's part of the global batch's balance loss.

    The loss is E * sum_i f_i * P_i, averaged over the routers: P_i is the mean probability of
    expert i in the global batch, and f_i the share of tokens that chose it. The loss is linear in
    P, so the parts of all micro-batches and ranks add up to it.

    Args:
        router_logits: one (N, E) tensor per router.
        shares: the result of `choice_shares`.
        tokens: tokens in the global batch.

    Source: Qiu et al. 2025 (arXiv 2501.11873), equation 2, with f from the previous global batch.
    """
    parts = []
    for logits_NE, f_E in zip(router_logits, shares, strict=True):
        P_E = logits_NE.float().softmax(-1).sum(0) / tokens
        parts.append(len(f_E) * (f_E * P_E).sum())
    return torch.stack(parts).mean()


def router_z_loss(router_logits: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """Return this micro-batch's part of the mean of log(Z)^2 over tokens and routers.

    Args:
        router_logits: one (N, E) tensor per router.
        tokens: tokens in the global batch.

    Source: Zoph et al. 2022 (ST-MoE, arXiv 2202.08906), equation 5.
    """
    squares = [logits_NE.float().logsumexp(-1).square().sum() for logits_NE in router_logits]
    return torch.stack(squares).mean() / tokens


def sums_by_source(
    losses_BT: torch.Tensor,
    batch: dict[str, torch.Tensor],
    num_sources: int,
    token_bytes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float64 sums of losses and of targets by source, without gradients.

    Uses a matrix product, because `index_add_` is not deterministic on a GPU.

    Args:
        token_bytes: `TokenBytes.rows`, (1 or 2, V) int64: number of text bytes in each token, and
            in each token at the start of a document.

    Returns:
        The sums, (2, S). With `token_bytes` (4, S): also the sums of losses over targets that
        represent text, and of the bytes in that text. Special tokens, such as EOS, are not counted
        in these two.
    """
    membership_SB = functional.one_hot(batch["sources"], num_sources).T.double()
    losses_BT, is_target_BT = losses_BT.detach().double(), batch["targets"] != IGNORED
    sums = [losses_BT.sum(1), is_target_BT.sum(1).double()]
    if token_bytes is not None:
        targets_BT = batch["targets"].clamp(min=0)
        bytes_BT = token_bytes[0][targets_BT] * is_target_BT
        sums.append((losses_BT * (bytes_BT > 0)).sum(1))
        if len(token_bytes) > 1:  # a token without text ends a document
            begins_BT = token_bytes[0][batch["input_ids"]] == 0
            bytes_BT -= (token_bytes[0] - token_bytes[1])[targets_BT] * (begins_BT & is_target_BT)
        sums.append(bytes_BT.sum(1).double())
    return torch.stack([membership_SB @ each for each in sums])


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Return bits per byte of text, which are comparable between tokenizers.

    Args:
        nats: sum of the tokens' losses.
        num_bytes: number of text bytes in these tokens.
    """
    return nats / (math.log(2) * num_bytes)
