"""Shows training data as text: a window of a source, a document, or sequences of a run.

Finds the window or document and its origin, and formats it; `zerolm.data.window_text` reads and
decodes it. Independent of the command line.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerolm.common.errors import ConfigError
from zerolm.config.settings import BEST_FIT
from zerolm.data.order import Order
from zerolm.data.packing import num_rows, open_intact_packing
from zerolm.data.window_text import (
    DocumentSpan,
    read_document,
    read_row,
    read_window,
    source_decoder,
)
from zerolm.report.run_order import ids_of_step, open_run
from zerolm.shards.origins import find_origin
from zerolm.shards.reader import Source


class Excerpt(NamedTuple):
    """Consecutive tokens of one source.

    Attributes:
        labels: what identifies the tokens, by name, such as window, epoch or document.
        parts: the tokens, one part per document.
    """

    source: Source
    labels: dict[str, Any]
    parts: list[DocumentSpan]


def find_window(
    source: Source, sequence: int, seq_len: int, seed: int | None, packing: str
) -> tuple[int, int]:
    """Return (window, epoch) of a sequence.

    Without a seed, `sequence` is the window. With a seed it is a sequence number of a run with that
    seed on this source alone, which `zerolm.data.order` maps to a window.
    """
    count = num_rows(source, seq_len, packing)
    if count == 0:
        raise ConfigError(
            f"{source.directory}: {source.num_tokens} tokens are too few for a window of --seq_len "
            f"{seq_len}, which needs {seq_len + 1}. Choose a smaller --seq_len."
        )
    if seed is not None:
        position = Order([count], [1.0], seed)(np.array([sequence]))
        return int(position.window[0]), int(position.epoch[0])
    if sequence >= count:
        raise ConfigError(
            f"--sequence {sequence}: {source.directory} has {count:,} windows of --seq_len "
            f"{seq_len}, numbered from 0. Choose a smaller one, or give the --seed of a run."
        )
    return sequence, 0


def window_excerpt(
    source: Source, sequence: int, seq_len: int, seed: int | None, packing: str
) -> Excerpt:
    """Return a window of a source or, with a seed, a sequence of a run on this source alone."""
    window, epoch = find_window(source, sequence, seq_len, seed, packing)
    labels: dict[str, Any] = {"window": window}
    if seed is not None:
        labels = {"sequence": sequence, "seed": seed, "epoch": epoch, **labels}
    if packing == BEST_FIT:
        parts = read_row(source, open_intact_packing(source, seq_len), window)
    else:
        start = window * seq_len
        labels["tokens"] = [start, start + seq_len + 1]
        parts = read_window(source, window, seq_len)
    return Excerpt(source, labels, parts)


def document_excerpt(source: Source, document: int) -> Excerpt:
    """Return a complete document of a source, by its number from 0."""
    if document >= source.num_documents:
        raise ConfigError(
            f"--document {document}: {source.directory} has {source.num_documents:,} documents, "
            f"numbered from 0. Choose a smaller one."
        )
    return Excerpt(source, {"document": document}, [read_document(source, document)])


def run_excerpts(
    run_dir: Path, sequence: int | None, step: int | None, row: int | None
) -> tuple[list[Excerpt], list[str]]:
    """Return sequences of a run, in its current data order, and notes for the user.

    Args:
        sequence: number of a sequence in the run; if None, `step` is given.
        step: return the sequences of the batch of this step.
        row: return only this sequence of the batch, counted from 0.
    """
    run = open_run(run_dir)
    notes: list[str] = []
    if step is not None:
        ids, notes = ids_of_step(run, step)
        if row is not None:
            if row >= len(ids):
                raise ConfigError(
                    f"--row {row}: the batch of step {step} has {len(ids)} rows, numbered from 0. "
                    f"Choose a smaller one."
                )
            ids = ids[row : row + 1]
    else:
        ids = np.array([sequence], np.int64)
    excerpts = []
    for place in run.rows(ids):
        labels = {
            "sequence": place.sequence,
            "source": run.names[place.source],
            "epoch": place.epoch,
            "window": place.window,
        }
        if len(run.order.starts) > 1:
            labels["stage"] = run.order.stage_of(place.sequence) + 1
        excerpts.append(Excerpt(run.sources[place.source], labels, place.parts))
    return excerpts, notes


def text_lines(excerpts: Sequence[Excerpt]) -> Iterator[str]:
    """Yield lines that show excerpts as text."""
    for excerpt in excerpts:
        source = excerpt.source
        decode = source_decoder(source)
        yield f"{source.directory}: {_title(excerpt)}"
        for part in excerpt.parts:
            extent = f"tokens {part.start:,} to {part.stop:,} of {part.length:,}"
            if part.start == 0 and part.stop == part.length:
                extent = f"complete, {part.length:,} tokens"
            found = _origin_of(source, part.document)
            where = f", {found['file']}, {found['unit']} {found['position']}" if found else ""
            yield f"--- document {part.document} ({extent}{where}) ---"
            yield decode(part.token_ids.tolist())


def _title(excerpt: Excerpt) -> str:
    labels, parts = excerpt.labels, excerpt.parts
    items = [
        f"tokens {value[0]:,} to {value[1]:,}" if name == "tokens" else f"{name} {value}"
        for name, value in labels.items()
        if name not in ("seed", "document")
    ]
    if "seed" in labels:
        items[0] += f" of seed {labels['seed']}"
    documents = f"documents {parts[0].document} to {parts[-1].document}"
    if "document" in labels:
        documents = f"document {parts[0].document}"
    return ", ".join([*items, f"{documents} of {excerpt.source.num_documents:,}"])


def json_lines(excerpts: Sequence[Excerpt]) -> Iterator[str]:
    """Yield one line per excerpt, a JSON object."""
    for excerpt in excerpts:
        decode = source_decoder(excerpt.source)
        documents = [
            {
                "document": part.document,
                "start": part.start,
                "stop": part.stop,
                "num_tokens": part.length,
                "origin": _origin_of(excerpt.source, part.document),
                "text": decode(part.token_ids.tolist()),
            }
            for part in excerpt.parts
        ]
        directory = str(excerpt.source.directory)
        yield json.dumps({"shards": directory, **excerpt.labels, "documents": documents})


def _origin_of(source: Source, document: int) -> dict[str, Any] | None:
    """Return the file and position that a document was read from; None if they are not recorded."""
    found = find_origin(source, document)
    return None if found is None else found._asdict()
