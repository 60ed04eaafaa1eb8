"""Work units: slices of the inputs, each processed by one task.

Units depend only on the inputs and their sizes. Together, they yield every document once, in
reading order. A stopped task resumes within its unit, at a `Position`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from data_prep.files.documents import Chunk, Document, InputRules, Position, Problem
from data_prep.files.encodings import canonical
from data_prep.files.inputs import END, Input, InputRange
from data_prep.files.parse import parse_chunk
from data_prep.formats import format_of
from data_prep.read.bad_input import MAX_PROBLEMS, Tally, describe_problems
from data_prep.read.readers import read_input
from zerolm.common.errors import ConfigError

CHUNK_BYTES = 1 << 16  # size of the text parsed and encoded at a time; see streams.READ_BYTES
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 1 << 22, 1 << 28
UNITS_PER_CORPUS = 128  # so that many workers finish a small corpus at about the same time
LAST_PIECES = 4
UNLIMITED_BYTES = 1 << 40
FILE_OVERHEAD_BYTES = 1 << 12  # added per file, so that a million empty files form many units


class WorkUnit(NamedTuple):
    """The input of one task: consecutive ranges of inputs."""

    ranges: tuple[InputRange, ...]
    size_bytes: int  # size as stored; 0 for hub datasets


def default_unit_bytes(inputs: Sequence[Input]) -> int:
    """Return the default unit size: a 128th of the corpus, but at least 4 and at most 256 MiB."""
    total = sum(each.size_bytes or 0 for each in inputs)
    return min(max(total // UNITS_PER_CORPUS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)


def plan_units(inputs: Sequence[Input], unit_bytes: int | None = None) -> list[WorkUnit]:
    """Divide the inputs into units of about `unit_bytes` of stored data.

    UTF-8 JSON lines and compressed WARC files are split at any byte, and Parquet files between row
    groups. Other files and hub datasets are not split. Small files share a unit.
    """
    limit = unit_bytes or default_unit_bytes(inputs)
    units: list[WorkUnit] = []
    ranges: list[InputRange] = []
    size = 0

    def close() -> None:
        nonlocal ranges, size
        if ranges:
            units.append(WorkUnit(tuple(ranges), size))
        ranges, size = [], 0

    for index, source in enumerate(inputs):
        for part, part_bytes in _split(index, source, limit):
            if size + part_bytes > limit or source.suffix == "hub":
                close()
            ranges.append(part)
            if source.suffix == "hub":
                close()
            else:
                size += part_bytes + (FILE_OVERHEAD_BYTES if part.start == 0 else 0)
    close()
    return units


def divide_last_units(units: list[WorkUnit], inputs: Sequence[Input]) -> list[WorkUnit]:
    """Divide the last two units further if they are JSON lines, to shorten the wait at the end."""
    divided = units[:-2]
    for unit in units[-2:]:
        part = unit.ranges[0]
        is_text = format_of(inputs[part.input]).is_text
        if len(unit.ranges) > 1 or part.stop is None or not is_text:
            divided.append(unit)
            continue
        size = part.stop - part.start
        limits = [part.start + size * piece // LAST_PIECES for piece in range(LAST_PIECES + 1)]
        divided += [
            WorkUnit((part._replace(start=start, stop=stop),), stop - start)
            for start, stop in pairwise(limits)
        ]
    return divided


def _split(index: int, source: Input, limit: int) -> list[tuple[InputRange, int]]:
    """Divide an input into ranges of about `limit` bytes or less; return them with their sizes."""
    size = source.size_bytes or 0
    is_divided = source.problem is None and size > limit
    parts = format_of(source).split(source, limit) if is_divided else []
    ranges = [(InputRange(index, start, stop), part_bytes) for start, stop, part_bytes in parts]
    return ranges or [(InputRange(index), size)]


def inputs_fingerprint(inputs: Sequence[Input], rules: InputRules) -> str:
    """Return a hash of what determines the documents: the rules, and each file's path, size and
    time.
    """
    listed = [
        [each.name, each.suffix, each.size_bytes, each.modified_ns]
        + ([each.hub.revision] if each.hub else [])
        + each.identity()
        for each in inputs
    ]
    # The fraction does not affect which documents are read.
    rules = replace(rules, max_bad_fraction=0, encoding=canonical(rules.encoding))
    shown = ", ".join(f"{name}={value!r}" for name, value in rules.content().items())
    content = json.dumps([listed, f"InputRules({shown})"], separators=(",", ":"))
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()


class Batch(NamedTuple):
    """Documents to process, and the position after the last one."""

    documents: list[Document]
    next: Position
    input_bytes: int


def read_batches(
    inputs: Sequence[Input],
    unit: WorkUnit,
    rules: InputRules,
    tally: Tally,
    chunk_bytes: int = CHUNK_BYTES,
    start: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Yield the documents of a unit in order, and count documents and all other input in `tally`.

    After each batch, the tally covers all input before `batch.next`: a task that saves both can
    resume there. A batch may be empty.

    Args:
        chunk_bytes: approximate size of a batch; a larger document forms a larger batch.
        start: the `next` position of a batch, to resume after that batch; may be a list of two
            integers.
    """
    fatal: list[Problem] = []
    for chunk in _read_chunks(inputs, unit, rules, chunk_bytes, start):
        input_rules = _rules_for(inputs[chunk.input], rules)
        parse = format_of(inputs[chunk.input]).parse
        documents, skipped, problems = parse_chunk(chunk, input_rules, parse)
        if problems and rules.on_bad_input == "fail":
            fatal += problems
        if fatal:  # the unit will be refused: continue only to report more problems
            if len(fatal) >= MAX_PROBLEMS:
                break
            continue
        if chunk.encoding:
            tally.changed[f"from {chunk.encoding}"] += len(documents)
        tally.num_documents += len(documents)
        tally.input_bytes += chunk.input_bytes
        tally.skipped += skipped
        tally.add_bad(problems)
        yield Batch(documents, chunk.next, chunk.input_bytes)
    if fatal:
        raise ConfigError(describe_problems(inputs, fatal[:MAX_PROBLEMS], rules))


def _read_chunks(
    inputs: Sequence[Input],
    unit: WorkUnit,
    rules: InputRules,
    chunk_bytes: int,
    start: Sequence[int] | None,
) -> Iterator[Chunk]:
    """Yield the content of a unit in order; see `read_batches`."""
    first, offset = Position(*start) if start is not None else (0, None)
    for number, part in list(enumerate(unit.ranges))[first:]:
        if offset is not None and number == first:
            part = part._replace(start=offset)
        after_range = Position(number + 1, 0)
        if number + 1 < len(unit.ranges):
            after_range = Position(number + 1, unit.ranges[number + 1].start)
        source = inputs[part.input]
        chunks = read_input(source, part, _rules_for(source, rules), chunk_bytes)
        for chunk, end in chunks:
            yield chunk._replace(next=after_range if end == END else Position(number, end))


def _rules_for(source: Input, rules: InputRules) -> InputRules:
    """Return the rules adapted to an input, which may have its own text field.

    Size limits do not apply to a stage's files: lines are longer than the texts that passed the
    limits, and the files compress well.
    """
    if source.text_field is not None:
        rules = replace(rules, text_field=source.text_field)
    if not source.of_stage:
        return rules
    return replace(rules, max_document_bytes=UNLIMITED_BYTES, max_expansion=UNLIMITED_BYTES)
