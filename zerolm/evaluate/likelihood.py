"""Log-likelihoods of continuations, computed on all ranks for downstream tasks.

Rows are sorted by length and divided into batches of about equal size, which are distributed over
the ranks in rounds. Every rank runs the same number of forward passes, because ZeRO-3 gathers
weights in each; a rank without a batch runs a dummy row. Works on token ids; must not depend on
text or tasks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from zerolm.distributed.collectives import sum_over_ranks
from zerolm.model.compile import eager
from zerolm.model.forward import own_logits

# Limit for a forward pass's float32 logits: with a chunked loss, training never stores the logits
# of a complete micro-batch, so evaluation must not need memory for them either.
MAX_LOGIT_BYTES = 1 << 30
PAD_TO = 8  # columns; limits the number of shapes for the allocator and kernels


class Row(NamedTuple):
    """Token ids; the last `num_scored` of them are scored, given the tokens before them."""

    ids: list[int]
    num_scored: int


class Ranks(NamedTuple):
    """This rank, and the number of ranks that share the work; by default, a single process.

    The pipeline stages of a replica are one rank here.

    Attributes:
        peers: whether there are other processes.
    """

    rank: int = 0
    world_size: int = 1
    peers: bool = False


SINGLE_PROCESS = Ranks()


def max_batch_tokens(requested: int, config: Any) -> int:
    """Return the requested number of tokens per forward pass, or a smaller number if their logits
    would be too large.
    """
    return min(requested, max(1, MAX_LOGIT_BYTES // (4 * config.get_text_config().vocab_size)))


def row_problem(row: Row, max_length: int) -> str | None:
    """Return why a row cannot be scored, or None if it can."""
    if row.num_scored < 1:
        return "has no token to score"
    if len(row.ids) <= row.num_scored:
        return "has no context token"
    if row.num_scored > max_length:
        return f"has {row.num_scored} tokens to score, but the maximum is {max_length}"
    return None


def truncate(row: Row, max_length: int) -> Row:
    """Drop the first tokens of a row that is too long. A row may be one token longer than the
    maximum, because its last token is only a target.

    Source: lm-evaluation-harness 0.4.13, `HFLM._loglikelihood_tokens`.
    """
    return Row(row.ids[-(max_length + 1) :], row.num_scored)


def batches(rows: Sequence[Row], batch_tokens: int, max_length: int) -> list[list[int]]:
    """Return the indices of the rows in each batch, longest rows first.

    The batches, and thus the shapes of forward passes, do not depend on the number of ranks.

    Args:
        batch_tokens: maximum per batch, including padding; a longer row forms its own batch.
        max_length: maximum length of a padded row.
    """
    order = sorted(range(len(rows)), key=lambda number: (-len(rows[number].ids), number))
    batched: list[list[int]] = []
    room = 0
    for number in order:
        if room == 0:
            batched.append([])
            room = max(1, batch_tokens // _columns(rows[number], max_length))
        batched[-1].append(number)
        room -= 1
    return batched


def _columns(row: Row, max_length: int) -> int:
    return min(-(-(len(row.ids) - 1) // PAD_TO) * PAD_TO, max_length)


def log_likelihoods(
    model: Any,
    rows: Sequence[Row],
    *,
    device: Any,
    batch_tokens: int,
    max_length: int,
    ranks: Ranks = SINGLE_PROCESS,
    tick: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-likelihood of each row's scored tokens, and whether each of them is the
    likeliest.

    Every rank must call this with the same rows.

    Args:
        model: a causal LM or a DeepSpeed engine around one, in evaluation mode.
        rows: rows without a `row_problem`; rows that are too long are truncated.
        max_length: maximum tokens in a row, at most the model's positions.
        tick: called before each forward pass.

    Returns:
        The float64 sums of natural logarithms, (N,), and the booleans, (N,). Both are on the CPU
        and the same on every rank.

    Source: lm-evaluation-harness 0.4.13, `HFLM._loglikelihood_tokens`, but always in float32.
    """
    rows = [truncate(row, max_length) for row in rows]
    sums = torch.zeros(2, len(rows), dtype=torch.float64, device=device)
    batched = batches(rows, batch_tokens, max_length)
    rounds = -(-len(batched) // ranks.world_size)
    dummy = Row([0, 0], 1)
    with torch.no_grad(), eager():
        for number in range(rounds):
            tick()
            index = number * ranks.world_size + ranks.rank
            numbers = batched[index] if index < len(batched) else []
            batch = [rows[n] for n in numbers] or [dummy]
            columns = max(_columns(row, max_length) for row in batch)
            scored, likeliest = _score(model, batch, columns, device)
            if numbers:
                where = torch.tensor(numbers, device=device)
                sums[0, where], sums[1, where] = scored, likeliest.double()
    if ranks.peers:
        sum_over_ranks(sums)  # each row is scored on one rank, and the other ranks add zero
    sums = sums.cpu()
    return sums[0], sums[1] > 0.5


def _score(
    model: Any, rows: Sequence[Row], columns: int, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score one batch, padded on the right to `columns`; causal attention ignores the padding.

    Returns zeros on pipeline stages that do not compute logits.
    """
    inputs_BT = torch.zeros(len(rows), columns, dtype=torch.int64)
    targets_BT = torch.zeros(len(rows), columns, dtype=torch.int64)
    scored_BT = torch.zeros(len(rows), columns, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids, end = torch.tensor(row.ids), len(row.ids) - 1
        inputs_BT[number, :end], targets_BT[number, :end] = ids[:-1], ids[1:]
        scored_BT[number, end - row.num_scored : end] = True
    inputs_BT, targets_BT = inputs_BT.to(device), targets_BT.to(device)
    scored_BT = scored_BT.to(device)
    logits_BTV = own_logits(model, inputs_BT)
    if logits_BTV is None:
        nothing_B = torch.zeros(len(rows), dtype=torch.float64, device=device)
        return nothing_B, nothing_B
    logits_NV, targets_N = logits_BTV[scored_BT].float(), targets_BT[scored_BT]
    losses_N = functional.cross_entropy(logits_NV, targets_N, reduction="none").double()
    missed_N = (logits_NV.argmax(-1) != targets_N).double()
    sums = torch.zeros(2, *scored_BT.shape, dtype=torch.float64, device=device)
    sums[0, scored_BT], sums[1, scored_BT] = losses_N, missed_N
    loss_B, missed_B = sums.sum(-1)
    return -loss_B, missed_B == 0
