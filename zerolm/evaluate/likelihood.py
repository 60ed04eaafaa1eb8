"""The log-likelihood of continuations, on all ranks: what HellaSwag and lm-eval's tasks ask.

Rows are sorted by length and cut into batches of about equal size, which are dealt to the ranks in
rounds. Every rank makes the same number of forward passes, with a row of its own in none: ZeRO-3
gathers weights in each. Knows token ids, no text and no task.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from zerolm.distributed.collectives import sum_over_ranks
from zerolm.model.compile import eager

LOGIT_BYTES = 1 << 30  # of a forward pass: a run may never have all logits of a micro-batch
PAD_TO = 8  # columns: fewer shapes for the allocator and for kernels that are tuned by shape


class Row(NamedTuple):
    """Token ids, of which the last `num_scored` are scored given those before."""

    ids: list[int]
    num_scored: int


class Ranks(NamedTuple):
    """Who shares the work: this rank of so many. The default is a process on its own."""

    rank: int = 0
    world_size: int = 1


ALONE = Ranks()


def fitting_tokens(wanted: int, config: Any) -> int:
    """Return how many tokens a forward pass may have, so that float32 logits fit.

    Args:
        wanted: at most so many.
        config: of the model.
    """
    return min(wanted, max(1, LOGIT_BYTES // (4 * config.get_text_config().vocab_size)))


def problem_of(row: Row, max_length: int) -> str | None:
    """Say why a row cannot be scored, None if it can."""
    if row.num_scored < 1:
        return "has no token to score"
    if len(row.ids) <= row.num_scored:
        return "has no token of context"
    if row.num_scored > max_length:
        return f"has {row.num_scored} tokens to score, which may be at most {max_length}"
    return None


def cut(row: Row, max_length: int) -> Row:
    """Leave out the first tokens of what is too long; the last token is only predicted.

    Source: lm-evaluation-harness 0.4.13, `HFLM._loglikelihood_tokens`.
    """
    return Row(row.ids[-(max_length + 1) :], row.num_scored)


def batches(rows: Sequence[Row], batch_tokens: int, max_length: int) -> list[list[int]]:
    """Return the numbers of the rows of each batch, longest rows first.

    The same for any number of ranks, and so is the shape of each forward pass.

    Args:
        batch_tokens: of a batch, padding included; a row that has more is a batch of its own.
        max_length: no row is padded beyond it.
    """
    order = sorted(range(len(rows)), key=lambda number: (-len(rows[number].ids), number))
    found: list[list[int]] = []
    room = 0
    for number in order:
        if room == 0:
            found.append([])
            room = max(1, batch_tokens // _columns(rows[number], max_length))
        found[-1].append(number)
        room -= 1
    return found


def _columns(row: Row, max_length: int) -> int:
    return min(-(-(len(row.ids) - 1) // PAD_TO) * PAD_TO, max_length)


def log_likelihoods(
    model: Any,
    rows: Sequence[Row],
    *,
    device: Any,
    batch_tokens: int,
    max_length: int,
    ranks: Ranks = ALONE,
    beat: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-likelihood of each row's last tokens, and whether each is the likeliest.

    Every rank must call, with the same rows.

    Args:
        model: a causal LM or a DeepSpeed engine around one, in evaluation mode.
        rows: none with a problem (`problem_of`); those that are too long are cut.
        batch_tokens: of a forward pass.
        max_length: tokens of a row in a forward pass, at most the positions of the model.
        beat: called before each forward pass.

    Returns:
        (N,) float64 sums of natural logarithms; (N,) bool. On the CPU, the same on every rank.

    Source: lm-evaluation-harness 0.4.13, `HFLM._loglikelihood_tokens`, but in float32 whatever the
        dtype of the logits is.
    """
    rows = [cut(row, max_length) for row in rows]
    sums = torch.zeros(2, len(rows), dtype=torch.float64, device=device)
    mine = batches(rows, batch_tokens, max_length)
    rounds = -(-len(mine) // ranks.world_size)
    nothing = Row([0, 0], 1)
    with torch.no_grad(), eager():
        for number in range(rounds):
            beat()
            place = number * ranks.world_size + ranks.rank
            numbers = mine[place] if place < len(mine) else []
            batch = [rows[n] for n in numbers] or [nothing]
            columns = max(_columns(row, max_length) for row in batch)
            scored, likeliest = _score(model, batch, columns, device)
            if numbers:
                where = torch.tensor(numbers, device=device)
                sums[0, where], sums[1, where] = scored, likeliest.double()
    if ranks.world_size > 1:
        sum_over_ranks(sums)  # each row is one rank's, the others add zero
    sums = sums.cpu()
    return sums[0], sums[1] > 0.5


def _score(
    model: Any, rows: Sequence[Row], columns: int, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one batch, padded on the right to `columns`, where a causal model does not look."""
    inputs_BT = torch.zeros(len(rows), columns, dtype=torch.int64)
    targets_BT = torch.zeros(len(rows), columns, dtype=torch.int64)
    scored_BT = torch.zeros(len(rows), columns, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids, end = torch.tensor(row.ids), len(row.ids) - 1
        inputs_BT[number, :end], targets_BT[number, :end] = ids[:-1], ids[1:]
        scored_BT[number, end - row.num_scored : end] = True
    inputs_BT, targets_BT = inputs_BT.to(device), targets_BT.to(device)
    scored_BT = scored_BT.to(device)
    logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
    logits_NV, targets_N = logits_BTV[scored_BT].float(), targets_BT[scored_BT]
    losses_N = functional.cross_entropy(logits_NV, targets_N, reduction="none").double()
    missed_N = (logits_NV.argmax(-1) != targets_N).double()
    sums = torch.zeros(2, *scored_BT.shape, dtype=torch.float64, device=device)
    sums[0, scored_BT], sums[1, scored_BT] = losses_N, missed_N
    loss_B, missed_B = sums.sum(-1)
    return -loss_B, missed_B == 0
