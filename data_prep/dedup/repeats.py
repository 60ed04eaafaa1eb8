"""The repeats stage: removes lines, paragraphs or substrings that occur earlier in the corpus.

Phases of lines and paragraphs: pieces (a task per work unit) -> repeats (one task per range of
hashes) -> write (a task per unit). For substrings, the phases anchors, repeated and windows
replace pieces. Places are equal if their 128-bit hashes are; `find_repeats.py` explains the tasks.
"""

import json
import unicodedata
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.arrays import NUMBER_MASK, num_partitions
from data_prep.dedup.find_repeats import (
    AnchorTask,
    PieceTask,
    RepeatedAnchorTask,
    RepeatTask,
    WindowTask,
    found_in_unit,
    runs_of,
    split_pieces,
)
from data_prep.dedup.options import RepeatsOptions
from data_prep.read.bad_input import Tally
from data_prep.read.parse import replace_text
from data_prep.read.stage_files import json_line
from data_prep.stages.documents import DocumentRow, Documents, StageInput
from data_prep.stages.stage_output import WORK, StageOutput, StageRun, task_output
from data_prep.tasks.phases import Executor, Record

NOTES = "repeats.jsonl.zst"
ALGORITHM = 1  # increment it when the result for the same input changes
SHOWN_CHARACTERS = 200
MAX_WORD = 64  # maximum by which a removed substring is shortened to end between words


@dataclass(frozen=True)
class WriteTask:
    """Writes the documents of a unit without repeats, and a note on each changed document."""

    documents: Documents
    output: Path
    options: RepeatsOptions
    num_partitions: int

    def __call__(self, task: int) -> Record:
        found = found_in_unit(self.output / WORK, "repeats", self.num_partitions, task)
        numbers, starts = np.unique(found["document"] & NUMBER_MASK, return_index=True)
        positions = np.split(found["position"], starts)[1:]
        repeats = dict(zip(numbers.tolist(), positions, strict=True))
        tally, removed_bytes = Tally(), 0
        with task_output(self.output, task) as output:
            for number, row in enumerate(self.documents.read(task, tally)):
                if number in repeats:
                    removed_bytes += self._write(row, repeats[number].tolist(), output)
                else:
                    size = len(row.text.encode())
                    output.keep(row.line, size, size)
            return {**output.close(), "tally": tally.record(), "removed_bytes": removed_bytes}

    def _write(self, row: DocumentRow, positions: list[int], output: StageOutput) -> int:
        """Write a document without its repeats; return the size of the repeats in bytes."""
        size = len(row.text.encode())
        if self.options.unit == "substrings":
            spans = covered_spans(row.text, positions, self.options.min_characters)
            removed = [row.text[start:end] for start, end in spans]
            text = _without(row.text, spans)
        else:
            removed, text = remove_pieces(row.text, positions, self.options.unit)
        left = len(text.encode())
        shown = removed[0][:SHOWN_CHARACTERS] if removed else ""
        note = {"id": row.id, "repeats": len(removed), "bytes": size - left, "first": shown}
        if not text.strip():
            output.drop("only_repeats", size, row.id, row.text, note)
            return 0
        if not removed:
            output.keep(row.line, size, size)
            return 0
        record = replace_text(json.loads(row.line), self.documents.text_field, text)
        output.keep(json_line(record), size, left)
        output.counts.add_changed(self.options.unit)
        output.note(note)
        return size - left


def remove_pieces(text: str, numbers: list[int], unit: str) -> tuple[list[str], str]:
    """Return the removed lines or paragraphs of a text, and the remaining text.

    Each kept piece is followed by its separator, except the last kept piece.
    """
    parts = split_pieces(text, unit)
    dropped = set(numbers)
    kept = [number for number in range(len(parts) // 2 + 1) if number not in dropped]
    left = [part for number in kept for part in parts[2 * number : 2 * number + 2]]
    if kept and kept[-1] < len(parts) // 2:
        left.pop()
    return [parts[2 * number] for number in numbers], "".join(left)


def covered_spans(text: str, positions: list[int], length: int) -> list[tuple[int, int]]:
    """Return the spans that windows of a length cover, shortened so that no word is split.

    Args:
        positions: where the windows start, sorted.
    """
    spans: list[list[int]] = []
    for position in positions:
        if spans and position <= spans[-1][1]:
            spans[-1][1] = position + length
        else:
            spans.append([position, position + length])
    shortened = (_between_words(text, start, end) for start, end in spans)
    return [(start, end) for start, end in shortened if start < end]


def _between_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Move the ends of a span that are within a word inwards to the nearest space."""
    if start and not (text[start - 1].isspace() or text[start].isspace()):
        place = next((i for i in range(start, min(start + MAX_WORD, end)) if text[i].isspace()), 0)
        start = place or start
    if end < len(text) and not (text[end - 1].isspace() or text[end].isspace()):
        low = max(start, end - MAX_WORD)
        place = next((i for i in range(end - 1, low, -1) if text[i].isspace()), 0)
        end = place or end
    return start, end


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    kept, last = [], 0
    for start, end in spans:
        kept.append(text[last:start])
        last = max(last, end)
    return "".join([*kept, text[last:]])


def repeats_identity(options: RepeatsOptions) -> dict[str, Any]:
    """Return what determines the result in addition to the documents, for a fingerprint."""
    length = "min_characters" if options.unit == "substrings" else "min_words"
    identity = {"algorithm": ALGORITHM, "unit": options.unit, length: getattr(options, length)}
    if options.unit != "substrings":
        identity["unicode"] = unicodedata.unidata_version
    return identity


def run_repeats(
    options: RepeatsOptions, given: StageInput, output: Path, executor: Executor
) -> dict[str, Any]:
    """Write a stage with the documents without repeats, and return its `stage.json`."""
    identity = repeats_identity(options)
    run = StageRun("repeats", asdict(options), identity, given, output, executor)
    if run.published is not None:
        return run.published
    documents, work = run.documents, run.work
    num_units = documents.num_tasks

    def partitions(records: list[Record]) -> int:
        return num_partitions(_total(records, "entries"), options.memory_bytes)

    counts = {}
    if options.unit == "substrings":
        length = options.min_characters
        anchors = run.phase("anchors", num_units, AnchorTask(documents, work, length))
        count = partitions(anchors)
        find = RepeatedAnchorTask(runs_of(work, anchors), work, count)
        found = run.phase("repeated", count, find)
        places = run.phase("windows", num_units, WindowTask(documents, work, length, count))
        counts["anchors"] = _total(anchors, "entries")
        counts["repeated_anchors"] = _total(found, "found")
    else:
        pieces = PieceTask(documents, work, options.unit, options.min_words)
        places = run.phase("pieces", num_units, pieces)
    counts["places"] = _total(places, "entries")
    count = partitions(places)
    distance = options.min_characters if options.unit == "substrings" else 1
    run.phase("find", count, RepeatTask(runs_of(work, places), work, count, distance))
    task = WriteTask(documents, output, options, count)
    removed = partial(_total, key="removed_bytes")
    return run.write("write", task, NOTES, removed_bytes=removed, **counts)


def _total(records: list[Record], key: str) -> int:
    return sum(record[key] for record in records)
