"""Measure whether a small model's logits depend on other rows, or on the attention kernel.

Models run in float32 on the CPU with large random weights. `same_logits` judges the results. Must
not depend on the settings of a run.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from zerolm.attention.stand_ins import runs_on_cpu
from zerolm.model.document_mask import isolating_inputs, isolating_masks
from zerolm.preflight.observed_model import build_with_large_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Rows = dict[str, torch.Tensor]  # a micro-batch, as `isolating_inputs` takes it
PARTS = 12
ROWS = (
    (12,),
    (1, 4, 7),
    (6, 6),
    (2, 2, 2, 2, 2, 2),
)  # each row's documents: their lengths in parts


def row_difference(
    config: "PretrainedConfig", kernel: str, tokens: int, last: int | None, *, training: bool
) -> float:
    """Return the largest difference of a logit between rows that run together and alone.

    Differences are relative to the standard deviation of the logits.

    Args:
        last: position of the last token in the first row, which stands for the end of a document of
            this length; None for rows without documents.
    """
    model = build_with_large_weights(config, kernel).train(training)

    def difference(seed: int) -> float:
        rows = _random_rows(model, tokens, seed, last)
        together = _logits(model, rows, seed)
        return _difference(together, torch.cat([_logits(model, row, seed) for row in _split(rows)]))

    return _of_both(difference)


def kernel_difference(
    config: "PretrainedConfig", default: str, kernel: str, tokens: int, last: int | None
) -> float:
    """Return the largest difference of a logit between two attention kernels.

    Errors that the model raises with the second kernel propagate. `last`: see `row_difference`.
    """
    expected = build_with_large_weights(config, default).eval()
    with runs_on_cpu(kernel):
        model = build_with_large_weights(config, kernel).eval()

        def difference(seed: int) -> float:
            rows = _random_rows(model, tokens, seed, last)
            return _difference(_logits(expected, rows, seed), _logits(model, rows, seed))

        return _of_both(difference)


def _of_both(difference: Callable[[int], float]) -> float:
    """Return the smaller difference in two batches: one may be due to a tie between experts."""
    first = difference(0)
    return first if not first else min(first, difference(1))


def _random_rows(model: Any, tokens: int, seed: int, last: int | None) -> Rows:
    """Return a micro-batch of as many rows as `ROWS` has. `last`: see `row_difference`."""
    shape, generator = (len(ROWS), tokens), torch.Generator().manual_seed(seed)
    size = model.config.get_text_config().vocab_size
    rows = {"input_ids": torch.randint(0, size, shape, generator=generator)}
    if last is None:
        return rows
    documents, positions, starts = [], [], []
    for row, parts in enumerate(ROWS):
        ends = [sum(parts[: n + 1]) * tokens // PARTS for n in range(len(parts))]
        begins = torch.tensor([0, *ends[:-1]])
        number = torch.searchsorted(torch.tensor(ends), torch.arange(tokens), right=True)
        documents.append(number)
        positions.append(torch.arange(tokens) - begins[number])
        starts.append(begins.unique() + row * tokens)
    positions[0] += last + 1 - tokens
    end = torch.tensor([len(ROWS) * tokens])
    return rows | {
        "document_ids": torch.stack(documents),
        "position_ids": torch.stack(positions),
        "boundaries": torch.cat([*starts, end]).int(),
    }


def _split(rows: Rows) -> list[Rows]:
    """Return each row as a micro-batch of its own."""
    count, tokens = rows["input_ids"].shape
    parts = []
    for row in range(count):
        part = {name: value[row : row + 1] for name, value in rows.items()}
        if "boundaries" in rows:
            bounds = rows["boundaries"] - row * tokens
            part["boundaries"] = bounds[(bounds >= 0) & (bounds <= tokens)]
        parts.append(part)
    return parts


def _logits(model: Any, rows: Rows, seed: int) -> torch.Tensor:
    """Return the logits, (B, T, V), with the masks and positions of a run."""
    torch.default_generator.manual_seed(seed)
    with torch.no_grad(), isolating_masks(rows, model):
        inputs = isolating_inputs(rows, model)
        found: torch.Tensor = model(input_ids=rows["input_ids"], use_cache=False, **inputs).logits
    return found.float()


def _difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    largest = float((expected - found).abs().max() / expected.std())
    return math.inf if math.isnan(largest) else largest
