"""Documents for the tasks of a stage, whether from the files of the stage before or from inputs."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_prep.bad_input import Tally, check_bad_fraction
from data_prep.documents import InputRules, find_text
from data_prep.phases import Executor, fingerprint
from data_prep.readers import Input
from data_prep.stage_files import (
    Stage,
    provenance_of,
    read_lines,
)
from data_prep.units import MAX_UNIT_BYTES, Unit, plan_units, read_batches
from data_prep.units import fingerprint as fingerprint_inputs
from zerolm.errors import ConfigError

BATCH_CHARACTERS = 1 << 20
LARGE_BYTES = MAX_UNIT_BYTES  # as stored: a unit above is a file that cannot be cut

Json = dict[str, Any]


class Row(NamedTuple):
    """A document as a stage passes it on."""

    text: str
    id: Any
    line: bytes  # the JSON object as it was, without its newline


class Documents(Protocol):
    """Documents cut into tasks: all of them, in order, are those of the input in its order."""

    @property
    def text_field(self) -> str:
        """The key of the text."""
        ...

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        ...

    @property
    def labels(self) -> list[str]:
        """Name what each task reads."""
        ...

    def read(self, task: int, tally: Tally | None = None) -> Iterator[Row]:
        """Yield the documents of a task, in order: the same at each call.

        Args:
            tally: where what was skipped is counted.
        """
        ...

    def left_out(self, records: Sequence[Json]) -> Tally:
        """Return what was no document, of all tasks; each of their records has a `tally`.

        Raises:
            ConfigError: it is too much.
        """
        ...

    def prepared(self, directory: Path, executor: Executor) -> "Documents":
        """Return the same documents in tasks of bounded size, read into a directory if need be."""
        ...


@dataclass(frozen=True)
class StageDocuments:
    """The documents of a published stage; a task is one of its files."""

    directory: Path
    paths: tuple[Path, ...]
    text_field: str
    bad: tuple[Json, ...] = ()  # a `tally`, of raw input that was read into this stage

    @property
    def num_tasks(self) -> int:
        """How many files there are."""
        return len(self.paths)

    @property
    def labels(self) -> list[str]:
        """Name what each task reads."""
        return [path.name for path in self.paths]

    def left_out(self, records: Sequence[Json]) -> Tally:
        """Of a stage, nothing is skipped."""
        return Tally.from_records(self.bad)

    def prepared(self, directory: Path, executor: Executor) -> Documents:
        """Return these: the files of a stage are not large."""
        return self

    def read(self, task: int, tally: Tally | None = None) -> Iterator[Row]:
        """Yield the documents of a task, in order.

        Raises:
            ConfigError: the file is damaged, or has something that is not a document.
        """
        import orjson

        path = self.paths[task]
        for number, line in enumerate(read_lines(path), 1):
            try:
                try:
                    record = orjson.loads(line)
                except ValueError:  # NaN and lone surrogates, in other keys
                    record = json.loads(line)
                text, name = find_text(record, self.text_field)[1], record["id"]
                if not isinstance(text, str):
                    raise TypeError(f"{self.text_field} is no string")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path}:{number}: is not a document of a stage ({error!r}). Run it again."
                ) from error
            yield Row(text, name, line)


@dataclass(frozen=True)
class UnitDocuments:
    """The documents of inputs; a task is a unit of them."""

    inputs: tuple[Input, ...]
    units: tuple[Unit, ...]
    rules: InputRules
    read_first: Callable[[Path, Executor], Stage] | None = None  # where a unit is large

    @property
    def text_field(self) -> str:
        """The key of the text."""
        return self.rules.text_field

    @property
    def num_tasks(self) -> int:
        """How many units there are."""
        return len(self.units)

    @property
    def labels(self) -> list[str]:
        """Name the first file that each task reads."""
        return [self.inputs[unit.pieces[0].input].name for unit in self.units]

    def left_out(self, records: Sequence[Json]) -> Tally:
        """Return what was no document. Raises ConfigError where it is too much."""
        tally = Tally.from_records([record["tally"] for record in records])
        check_bad_fraction(self.inputs, tally, self.rules)
        return tally

    def prepared(self, directory: Path, executor: Executor) -> Documents:
        """Return these, or a stage of them where a unit, such as a compressed file, is large."""
        if self.read_first is None:
            return self
        stage = self.read_first(directory, executor)
        return StageDocuments(
            stage.directory, tuple(stage.paths), stage.text_field, (stage.manifest["reading"],)
        )

    def read(self, task: int, tally: Tally | None = None) -> Iterator[Row]:
        """Yield the documents of a unit, in order; one without an `id` is named by its place.

        Raises:
            ConfigError: bad input; a file that has changed.
        """
        tally = tally or Tally()
        for batch in read_batches(self.inputs, self.units[task], self.rules, tally):
            for document in batch.documents:
                record = document.record or {self.text_field: document.text}
                if "id" not in record:
                    record = {
                        "id": f"{self.inputs[document.input].name}:{document.start}",
                        **record,
                    }
                yield Row(document.text, record["id"], _to_line(record))


def _to_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line that says the same, also where JSON is stretched."""
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str).encode()
    except UnicodeEncodeError:  # a lone surrogate in another key than the text
        return json.dumps(record, separators=(",", ":"), default=str).encode()


def stage_documents(stage: Stage) -> tuple[StageDocuments, str, dict[str, Any]]:
    """Return the documents of a stage, a fingerprint of them, and where they are from."""
    documents = StageDocuments(stage.directory, tuple(stage.paths), stage.text_field)
    files = [(entry["file"], entry["sha256"]) for entry in stage.manifest["files"]]
    return documents, fingerprint([stage.text_field, files]), provenance_of(stage)


def unit_documents(
    inputs: Sequence[Input],
    rules: InputRules,
    read: Callable[[InputRules, Path, Executor], Stage] | None = None,
) -> tuple[UnitDocuments, str, dict[str, Any]]:
    """Return the documents of inputs, a fingerprint of them, and where they are from.

    Args:
        read: makes a stage of the inputs, where one of them is a large unit that cannot be cut.
    """
    rules = replace(rules, keep_records=True)
    units = plan_units(inputs)
    large = any(
        unit.size_bytes > LARGE_BYTES or inputs[unit.pieces[0].input].suffix == "hub"
        for unit in units
    )
    first = partial(read, rules) if large and read is not None else None
    documents = UnitDocuments(tuple(inputs), tuple(units), rules, first)
    names = [{"file": each.name, "size_bytes": each.size_bytes} for each in inputs]
    return documents, fingerprint_inputs(inputs, rules), {"stage": "inputs", "inputs": names}


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Group documents, so that numpy has enough to do at a time."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.text) + 64
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
