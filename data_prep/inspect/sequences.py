"""What a model is trained on, as text: a window, a document, or a sequence of a run.

zerolm/excerpts.py reads and decodes; here is which window or document it is, where it is from, and
how it is shown. Knows no command line.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerolm.errors import ConfigError
from zerolm.excerpts import Part, decoder_of, read_document, read_row, read_window
from zerolm.order import Order
from zerolm.origins import origin
from zerolm.packing import num_rows, open_packing
from zerolm.run_order import ids_of_step, open_run
from zerolm.settings import BEST_FIT
from zerolm.shards import Source


class Excerpt(NamedTuple):
    """Tokens of one source to show.

    Attributes:
        about: what they are, by name; `source` is its directory.
        parts: document by document.
    """

    source: Source
    about: dict[str, Any]
    parts: list[Part]


def find_window(
    source: Source, sequence: int, seq_len: int, seed: int | None, packing: str
) -> tuple[int, int]:
    """Return (window, epoch) of a sequence.

    Without a seed `sequence` is the window itself; with one it is a sequence number of a run on
    this source alone, and zerolm.order says which window that is.

    Raises:
        ConfigError: a sequence that does not exist.
    """
    count = num_rows(source, seq_len, packing)
    if count == 0:
        raise ConfigError(
            f"{source.directory}: {source.num_tokens} tokens are not one window of --seq_len "
            f"{seq_len}, which needs {seq_len + 1}. Choose a smaller --seq_len."
        )
    if seed is not None:
        place = Order([count], [1.0], seed)(np.array([sequence]))
        return int(place.window[0]), int(place.epoch[0])
    if sequence >= count:
        raise ConfigError(
            f"--sequence {sequence}: {source.directory} has {count:,} windows of --seq_len "
            f"{seq_len}, numbered from 0. Choose a smaller one, or give the --seed of a run."
        )
    return sequence, 0


def window_excerpt(
    source: Source, sequence: int, seq_len: int, seed: int | None, packing: str
) -> Excerpt:
    """Return a window of a source, or a sequence of a run on it alone.

    Raises:
        ConfigError: see `find_window`.
    """
    window, epoch = find_window(source, sequence, seq_len, seed, packing)
    about: dict[str, Any] = {"window": window}
    if seed is not None:
        about = {"sequence": sequence, "seed": seed, "epoch": epoch, **about}
    if packing == BEST_FIT:
        parts = read_row(source, open_packing(source, seq_len), window)
    else:
        start = window * seq_len
        about["tokens"] = [start, start + seq_len + 1]
        parts = read_window(source, window, seq_len)
    return Excerpt(source, about, parts)


def document_excerpt(source: Source, document: int) -> Excerpt:
    """Return a whole document of a source, by its number from 0.

    Raises:
        ConfigError: there is no such document.
    """
    if document >= source.num_documents:
        raise ConfigError(
            f"--document {document}: {source.directory} has {source.num_documents:,} documents, "
            f"numbered from 0. Choose a smaller one."
        )
    return Excerpt(source, {"document": document}, [read_document(source, document)])


def run_excerpts(
    run_dir: Path, sequence: int | None, step: int | None, row: int | None
) -> tuple[list[Excerpt], list[str]]:
    """Return sequences of a run as it orders its data now, and what else is to be said of them.

    Args:
        sequence: its number in the run; or None, and
        step: all of the batch of a step, or of that
        row: one, from 0 in the order of their numbers.

    Raises:
        ConfigError: there is no such run, step, row or data.
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
    found = []
    for place in run.rows(ids):
        about = {
            "sequence": place.sequence,
            "source": run.names[place.source],
            "epoch": place.epoch,
            "window": place.window,
        }
        if len(run.order.starts) > 1:
            about["stage"] = run.order.stage_of(place.sequence) + 1
        found.append(Excerpt(run.sources[place.source], about, place.parts))
    return found, notes


def lines(excerpts: Sequence[Excerpt]) -> Iterator[str]:
    """Yield what shows excerpts to a person."""
    for excerpt in excerpts:
        source, parts = excerpt.source, excerpt.parts
        decode = decoder_of(source)
        words = [
            f"tokens {value[0]:,} to {value[1]:,}" if name == "tokens" else f"{name} {value}"
            for name, value in excerpt.about.items()
            if name not in ("seed", "document")
        ]
        if "seed" in excerpt.about:
            words[0] += f" of seed {excerpt.about['seed']}"
        last = f" to {parts[-1].document}" if "document" not in excerpt.about else ""
        words.append(
            f"document{'s' if last else ''} {parts[0].document}{last} of {source.num_documents:,}"
        )
        yield f"{source.directory}: {', '.join(words)}"
        for part in parts:
            whole = part.start == 0 and part.stop == part.length
            which = (
                f"whole, {part.length:,} tokens"
                if whole
                else f"tokens {part.start:,} to {part.stop:,} of {part.length:,}"
            )
            found = _origin(source, part.document)
            where = f", {found['file']}, {found['unit']} {found['position']}" if found else ""
            yield f"--- document {part.document} ({which}{where}) ---"
            yield decode(part.token_ids.tolist())


def as_json(excerpts: Sequence[Excerpt]) -> Iterator[str]:
    """Yield a JSON object a line, one for each excerpt."""
    for excerpt in excerpts:
        decode = decoder_of(excerpt.source)
        documents = [
            {
                "document": part.document,
                "start": part.start,
                "stop": part.stop,
                "num_tokens": part.length,
                "origin": _origin(excerpt.source, part.document),
                "text": decode(part.token_ids.tolist()),
            }
            for part in excerpt.parts
        ]
        directory = str(excerpt.source.directory)
        yield json.dumps({"shards": directory, **excerpt.about, "documents": documents})


def _origin(source: Source, document: int) -> dict[str, Any] | None:
    """Return the file that a document was read from and where in it, if the shards know."""
    found = origin(source, document)
    return None if found is None else found._asdict()
