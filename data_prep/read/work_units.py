"""Units: slices of the inputs, for a task each, that depend on the inputs and their sizes alone.

The documents of all units, one after the other, are those of the inputs in reading order, however
many units there are. A task that was stopped goes on inside of its unit, at a `Position`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from data_prep.bad_input import MAX_PROBLEMS, Tally, describe
from data_prep.documents import (
    Chunk,
    Document,
    InputRules,
    Position,
    Problem,
    read_documents,
)
from data_prep.readers import END, Input, read_input
from data_prep.tables import reading_errors
from zerolm.errors import ConfigError

CHUNK_BYTES = 1 << 16  # of text, to parse and encode at a time; see streams.READ_BYTES
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 1 << 22, 1 << 28
UNITS_OF_A_CORPUS = 128  # enough for many workers, and for an even end, where it is small
NO_LIMIT = 1 << 40
FILE_BYTES = 1 << 12  # what a file costs beside its content: a million empty ones are not one unit


class Piece(NamedTuple):
    """A part of an input: the documents that start in [start, stop)."""

    input: int  # number of the input
    start: int = 0  # byte of plain JSON lines, row of Parquet, else 0
    stop: int | None = None  # None: to the end


class Unit(NamedTuple):
    """What one task reads: pieces one after the other."""

    pieces: tuple[Piece, ...]
    size_bytes: int  # as stored; 0 for the hub


def default_unit_bytes(inputs: Sequence[Input]) -> int:
    """Return the size of a unit: a 128th of the corpus, from 4 to 256 MiB."""
    total = sum(each.size_bytes or 0 for each in inputs)
    return min(max(total // UNITS_OF_A_CORPUS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)


def plan_units(inputs: Sequence[Input], unit_bytes: int | None = None) -> list[Unit]:
    """Cut the inputs into units of about `unit_bytes`, as stored; together they are everything.

    Plain JSON lines are cut by bytes and Parquet between row groups. A compressed file is whole,
    and so is a data set of the hub. Small files share a unit.
    """
    limit = unit_bytes or default_unit_bytes(inputs)
    units: list[Unit] = []
    pieces: list[Piece] = []
    size = 0

    def close() -> None:
        nonlocal pieces, size
        if pieces:
            units.append(Unit(tuple(pieces), size))
        pieces, size = [], 0

    for number, each in enumerate(inputs):
        for piece, piece_bytes in _cut(number, each, limit):
            if size + piece_bytes > limit or each.suffix == "hub":
                close()
            pieces.append(piece)
            if each.suffix == "hub":
                close()
            else:
                size += piece_bytes + (FILE_BYTES if piece.start == 0 else 0)
    close()
    return units


def _cut(number: int, each: Input, limit: int) -> list[tuple[Piece, int]]:
    size = each.size_bytes or 0
    if each.problem is None and size > limit and each.suffix == ".jsonl":
        count = -(-size // limit)
        limits = [size * part // count for part in range(count + 1)]
        return [(Piece(number, start, stop), stop - start) for start, stop in pairwise(limits)]
    if each.problem is None and size > limit and each.suffix == ".parquet":
        return _cut_table(number, each, limit)
    return [(Piece(number), size)]


def _cut_table(number: int, each: Input, limit: int) -> list[tuple[Piece, int]]:
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(each.name)
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    except reading_errors():  # whoever reads it says what is wrong
        return [(Piece(number), each.size_bytes or 0)]
    parts: list[tuple[Piece, int]] = []
    start = stop = 0
    for position, count in enumerate(rows):
        stop += count
        size = (each.size_bytes or 0) * (stop - start) // max(1, sum(rows))
        following = rows[position + 1] if position + 1 < len(rows) else 0
        if not following or size * (stop - start + following) > limit * (stop - start):
            parts.append((Piece(number, start, stop), size))
            start = stop
    return parts or [(Piece(number), each.size_bytes or 0)]


def fingerprint(inputs: Sequence[Input], rules: InputRules) -> str:
    """Return a hash of what the documents depend on: files by path, size and time, and rules."""
    what = [
        [each.name, each.suffix, each.size_bytes, each.modified_ns]
        + ([each.hub.revision] if each.hub else [])
        for each in inputs
    ]
    rules = replace(rules, max_bad_fraction=0)  # it says what is refused, and changes no document
    content = json.dumps([what, repr(rules)], separators=(",", ":"))
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()


def read_unit(
    inputs: Sequence[Input],
    unit: Unit,
    rules: InputRules,
    chunk_bytes: int = CHUNK_BYTES,
    start: Sequence[int] | None = None,
) -> Iterator[Chunk]:
    """Yield the content of a unit in order, in chunks of about `chunk_bytes`.

    A chunk holds whole documents, so that a long document makes a larger chunk. `Chunk.next` is
    what to give as `start` to go on behind it; a list of its two numbers will do.

    Raises:
        ConfigError: a file that has changed since it was listed.
        ZerolmError: a hub data set that stopped to answer.
    """
    first, offset = Position(*start) if start is not None else (0, None)
    for number, piece in list(enumerate(unit.pieces))[first:]:
        begin = piece.start if offset is None or number > first else offset
        behind = Position(number + 1, 0)
        if number + 1 < len(unit.pieces):
            behind = Position(number + 1, unit.pieces[number + 1].start)
        own = rules_of(inputs[piece.input], rules)
        chunks = read_input(list(inputs), piece.input, begin, piece.stop, own, chunk_bytes)
        for chunk, end in chunks:
            yield chunk._replace(next=behind if end == END else Position(number, end))


def rules_of(each: Input, rules: InputRules) -> InputRules:
    """Return the rules for an input: the files of a stage have no limits.

    A document is a longer line there than it was a text, and its file is compressed well.
    """
    if not each.of_stage:
        return rules
    return replace(rules, max_document_bytes=NO_LIMIT, max_expansion=NO_LIMIT)


class Batch(NamedTuple):
    """Documents to work on, and where to go on behind them."""

    documents: list[Document]
    next: Position
    input_bytes: int


def read_batches(
    inputs: Sequence[Input],
    unit: Unit,
    rules: InputRules,
    tally: Tally,
    chunk_bytes: int = CHUNK_BYTES,
    start: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Yield the documents of a unit in order, and count in `tally` what else is there.

    When a batch comes, the tally is that up to `batch.next`: both together are what a task has to
    keep in order to go on. A batch may have no documents.

    Raises:
        ConfigError: bad input under `on_bad_input` "fail", with the first problems of the unit; a
            file that has changed since it was listed.
        ZerolmError: a hub data set that stopped to answer.
    """
    fatal: list[Problem] = []
    for chunk in read_unit(inputs, unit, rules, chunk_bytes, start):
        own = rules_of(inputs[chunk.input], rules)
        documents, skipped, problems = read_documents(chunk, own)
        if problems and rules.on_bad_input == "fail":
            fatal += problems
        if fatal:  # nothing will come of this unit; see what else is wrong with it
            if len(fatal) >= MAX_PROBLEMS:
                break
            continue
        tally.num_documents += len(documents)
        tally.input_bytes += chunk.input_bytes
        tally.skipped += skipped
        tally.add_bad(problems)
        yield Batch(documents, chunk.next, chunk.input_bytes)
    if fatal:
        raise ConfigError(describe(inputs, fatal[:MAX_PROBLEMS], rules))
