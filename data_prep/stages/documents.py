"""`Documents`: the input of a stage's tasks, from the previous stage or from raw inputs."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.files.documents import InputRules
from data_prep.files.parse import find_text
from data_prep.read.bad_input import Tally, check_bad_fraction
from data_prep.read.readers import Input, require_unchanged
from data_prep.read.stage_files import Stage, provenance_of, read_stage_lines
from data_prep.read.work_units import (
    MAX_UNIT_BYTES,
    WorkUnit,
    inputs_fingerprint,
    plan_units,
    read_batches,
)
from data_prep.tasks.phases import Executor, fingerprint
from zerolm.common.errors import ConfigError

BATCH_CHARACTERS = 1 << 20
LARGE_BYTES = MAX_UNIT_BYTES  # stored size; only a file that cannot be split forms a larger unit

Json = dict[str, Any]


class DocumentRow(NamedTuple):
    """A document, and the line that a stage writes if it keeps the document."""

    text: str
    id: Any
    line: bytes  # the document's unchanged JSON object, without a newline


@dataclass(frozen=True)
class Documents:
    """Documents divided into tasks that together read the entire input in order."""

    text_field: str  # key of the text
    labels: tuple[str, ...]  # description of each task's input, for messages

    @property
    def num_tasks(self) -> int:
        """The number of tasks."""
        return len(self.labels)

    def read(self, task: int, tally: Tally | None = None) -> Iterator[DocumentRow]:
        """Yield the documents of a task in order; each call yields the same documents.

        Args:
            tally: counts what was skipped.
        """
        raise NotImplementedError

    def total_tally(self, records: Sequence[Json]) -> Tally:
        """Return the sum of the tallies of all tasks, which the records contain under `tally`."""
        raise NotImplementedError

    def bounded(self, directory: Path, executor: Executor) -> "Documents":
        """Return the same documents, divided into tasks of bounded size.

        If inputs are too large for one task and cannot be split, the inputs are first read into a
        stage in `directory`.
        """
        return self


@dataclass(frozen=True)
class StageDocuments(Documents):
    """The documents of a published stage: each task reads one of its files."""

    paths: tuple[Path, ...]
    tallies: tuple[Json, ...] = ()  # tally of the raw input that was read into this stage

    @classmethod
    def of(cls, stage: Stage, *tallies: Json) -> "StageDocuments":
        """Return the documents of a stage."""
        names = tuple(path.name for path in stage.paths)
        return cls(stage.text_field, names, tuple(stage.paths), tallies)

    def total_tally(self, records: Sequence[Json]) -> Tally:
        """Return the tally of the raw input, because no document of a stage is skipped."""
        return Tally.from_records(self.tallies)

    def read(self, task: int, tally: Tally | None = None) -> Iterator[DocumentRow]:
        """Yield the documents of a file, in order."""
        import orjson

        path = self.paths[task]
        for number, line in enumerate(read_stage_lines(path), 1):
            try:
                try:
                    record = orjson.loads(line)
                except ValueError:  # a key other than the text contains NaN or a lone surrogate
                    record = json.loads(line)
                text, document_id = find_text(record, self.text_field)[1], record["id"]
                if not isinstance(text, str):
                    raise TypeError(f"{self.text_field} is not a string")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path}:{number}: is not a document of a stage ({error!r}). Run the stage "
                    f"again."
                ) from error
            yield DocumentRow(text, document_id, line)


@dataclass(frozen=True)
class InputDocuments(Documents):
    """The documents of raw inputs: each task reads one work unit."""

    inputs: tuple[Input, ...]
    units: tuple[WorkUnit, ...]
    rules: InputRules
    write_stage: Callable[[Path, Executor], Stage] | None = None  # required if a unit is large

    def total_tally(self, records: Sequence[Json]) -> Tally:
        """Return the sum of the tallies of all units; see `Documents`."""
        tally = Tally.from_records([record["tally"] for record in records])
        check_bad_fraction(self.inputs, tally, self.rules)
        require_unchanged(self.inputs)
        return tally

    def bounded(self, directory: Path, executor: Executor) -> Documents:
        """Return these documents; if a unit is large, first write all of them to a stage."""
        if self.write_stage is None:
            return self
        stage = self.write_stage(directory, executor)
        return StageDocuments.of(stage, stage.manifest["reading"])

    def read(self, task: int, tally: Tally | None = None) -> Iterator[DocumentRow]:
        """Yield the documents of a unit in order; a missing `id` is set to `file:position`."""
        tally = tally or Tally()
        for batch in read_batches(self.inputs, self.units[task], self.rules, tally):
            for document in batch.documents:
                record = document.record or {self.text_field: document.text}
                if record.get("id") in (None, ""):
                    name = self.inputs[document.input].name
                    record = {"id": "", **record} | {"id": f"{name}:{document.start}"}
                yield DocumentRow(document.text, record["id"], _to_line(record))


def _to_line(record: Json) -> bytes:
    """Convert a record to a line of JSON; values that have no JSON type become strings."""
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str).encode()
    except UnicodeEncodeError:  # a key other than the text contains a lone surrogate
        return json.dumps(record, separators=(",", ":"), default=str).encode()


class StageInput(NamedTuple):
    """The input of a stage."""

    documents: Documents
    fingerprint: str
    provenance: Json  # for `stage.json`


def stage_documents(stage: Stage) -> StageInput:
    """Return the documents of a stage, as the input for the next stage."""
    files = [(entry["file"], entry["sha256"]) for entry in stage.manifest["files"]]
    key = fingerprint([stage.text_field, files])
    return StageInput(StageDocuments.of(stage), key, provenance_of(stage))


def input_documents(
    inputs: Sequence[Input],
    rules: InputRules,
    write_stage: Callable[[InputRules, Path, Executor], Stage] | None = None,
) -> StageInput:
    """Return the documents of raw inputs, as the input for a stage.

    Args:
        write_stage: function that reads the inputs into a stage; called if an input is large and
            cannot be split.
    """
    rules = replace(rules, keep_records=True)
    units = tuple(plan_units(inputs))
    first = [inputs[unit.ranges[0].input] for unit in units]
    is_large = any(unit.size_bytes > LARGE_BYTES for unit in units)
    is_large = is_large or any(each.suffix == "hub" for each in first)
    write = partial(write_stage, rules) if is_large and write_stage is not None else None
    labels = tuple(each.name for each in first)
    documents = InputDocuments(rules.text_field, labels, tuple(inputs), units, rules, write)
    names = [{"file": each.name, "size_bytes": each.size_bytes} for each in inputs]
    provenance = {"stage": "inputs", "inputs": names}
    return StageInput(documents, inputs_fingerprint(inputs, rules), provenance)


def chosen_batches(
    documents: Documents, task: int, numbers: Collection[int] | None = None
) -> Iterator[tuple[list[int], list[DocumentRow]]]:
    """Yield a task's documents in batches, as (numbers, documents); only those in `numbers` if
    given.
    """
    places: list[int] = []

    def read() -> Iterator[DocumentRow]:
        for number, row in enumerate(documents.read(task)):
            if numbers is None or number in numbers:
                places.append(number)
                yield row

    for rows in batch_rows(read()):
        yield places[: len(rows)], rows
        del places[: len(rows)]


def batch_rows(rows: Iterable[DocumentRow]) -> Iterator[list[DocumentRow]]:
    """Group documents into lists of about a million characters, which is enough work for a numpy
    call.
    """
    batch: list[DocumentRow] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.text) + 64
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
