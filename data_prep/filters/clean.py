"""The clean stage: passes documents through filters and writes the kept documents to a stage.

Task i reads unit i of the inputs and writes file i, or several files if the unit is large (for
example, a compressed file). Dropped documents are counted by reason, with examples, and are written
to separate files if requested.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

from data_prep.files.documents import Document, InputRules
from data_prep.files.parse import replace_text
from data_prep.filters.build import Filters, build_filters, filters_identity
from data_prep.read.bad_input import Tally, check_bad_fraction
from data_prep.read.readers import Input, require_unchanged
from data_prep.read.stage_files import (
    STAGE_MANIFEST,
    json_line,
    publish_stage,
    read_stage,
    remove_unlisted_files,
    stage_file,
)
from data_prep.read.work_units import (
    Batch,
    WorkUnit,
    inputs_fingerprint,
    plan_units,
    read_batches,
)
from data_prep.stages.counts import merge_counts
from data_prep.stages.stage_output import StageOutput
from data_prep.tasks.phases import Executor, Phase, fingerprint, run_phase
from data_prep.tasks.progress import TaskProgress
from zerolm.common.errors import ConfigError, RecordError
from zerolm.common.files import exists, write_json
from zerolm.common.records import Count, read_record

ID = "id"
RECORDS = "records/clean"
FILE_RECORDS = f"{RECORDS}/pieces"  # records of finished files whose task has not finished
# Filters such as Gopher's and FineWeb's take about a minute for this much text. A stopped task
# repeats at most this much work, and each task of the next stage reads this much.
PIECE_BYTES = 1 << 27

Json = dict[str, Any]


class _FileRecord(TypedDict):
    inputs: str
    files: dict[str, Count]
    next: list[int] | None
    reading: dict[str, Any]
    entry: dict[str, Any]


@dataclass(frozen=True)
class CleanOptions:
    """The options for reading and filtering documents."""

    filters: tuple[Json, ...] = ()  # as in the recipe; already checked by `filter_problems`
    rules: InputRules = field(default_factory=lambda: InputRules(keep_records=True))
    unit_bytes: int | None = None  # input per task; None to derive it from the size of all inputs
    keep_dropped: Path | None = None  # directory for dropped documents
    piece_bytes: int = PIECE_BYTES  # size of the text read for each file of the stage


@dataclass(frozen=True)
class CleanTask:
    """Filters one unit; see `Phase.run`.

    Each file of a unit contains the result of about `piece_bytes` of input text. Each file has its
    own record, so a stopped task resumes after its last complete file. No file's content depends on
    where a task was stopped.
    """

    inputs: tuple[Input, ...]
    units: tuple[WorkUnit, ...]
    options: CleanOptions
    output: Path
    key: str  # fingerprint of the phase; files with a different key are rewritten

    def __call__(self, task: int) -> Json:
        """Write the missing files of a unit."""
        done = self._finished_files(task)
        tally = Tally.from_records([record["reading"] for record in done[-1:]])
        start = done[-1]["next"] if done else None
        unit = self.units[task]
        progress = TaskProgress(self.output / RECORDS / f"{task:05d}.running", unit.size_bytes)
        progress.add(tally.input_bytes, tally.num_documents, 0)
        batches = read_batches(self.inputs, unit, self.options.rules, tally, start=start)
        has_more = True
        while has_more:
            with self._open_file(task, len(done)) as file:
                end = self._fill(file, batches, progress)
                has_more = end is not None
                if has_more or not done or file.counts.sums["documents_in"]:
                    record = {**file.close(), "inputs": self.key, "next": end}
                    record["reading"] = tally.record()
                    if has_more:
                        path = self._file_record_path(task, len(done))
                        write_json(path, record, many_writers=True)
                    done.append(record)
        return {
            **merge_counts(done),
            "files": {name: size for record in done for name, size in record["files"].items()},
            "entries": [record["entry"] for record in done],
            "reading": tally.record(),
        }

    def _fill(
        self, file: StageOutput, batches: Iterator[Batch], progress: TaskProgress
    ) -> Sequence[int] | None:
        """Filter documents into a file until it is full; return where to resume, or None at the end
        of the unit.
        """
        filters = _build_once(json.dumps(self.options.filters))
        for batch in batches:
            for document in batch.documents:
                self._filter(filters, document, file)
            progress.add(batch.input_bytes, len(batch.documents), 0)
            if file.counts.sums["text_bytes_in"] >= self.options.piece_bytes:
                return batch.next
        return None

    def _open_file(self, task: int, number: int) -> StageOutput:
        name = stage_file(task, number)
        dropped = self.options.keep_dropped
        notes = None if dropped is None else dropped / name
        return StageOutput(self.output, self.output / name, notes)

    def _file_record_path(self, task: int, number: int) -> Path:
        return self.output / FILE_RECORDS / f"{task:05d}_{number:05d}.json"

    def _finished_files(self, task: int) -> list[Json]:
        """Return the records of the files that a stopped task finished, up to the first missing
        file.
        """
        done: list[Json] = []
        while True:
            try:
                record = read_record(self._file_record_path(task, len(done)), _FileRecord)
                if record is None or record["inputs"] != self.key:
                    return done
                for name, size in record["files"].items():
                    if (self.output / name).stat().st_size != size:
                        return done
            except (OSError, ValueError, RecordError):
                return done
            done.append(dict(record))

    def _filter(self, filters: Filters, document: Document, file: StageOutput) -> None:
        """Apply the filters to one document, and write it to the file or count it as dropped."""
        text_field = self.options.rules.text_field
        record = dict(document.record or {})
        document_id = record.get(ID)
        if document_id in (None, ""):
            document_id = f"{self.inputs[document.input].name}:{document.start}"
            record[ID] = document_id
        size = len(document.text.encode())
        others = {key: value for key, value in record.items() if key not in (text_field, ID)}
        result = filters.apply(document.text, str(document_id), others)
        reason, shown = result.reason, result.text
        if result.kept and not result.text:
            reason, shown = "emptied", document.text
        if reason:
            note = replace_text(record, text_field, document.text) | result.added
            note["dropped_by"] = reason
            file.drop(reason, size, document_id, shown, note)
            return
        for name in result.changed:
            file.counts.add_changed(name)
        size_out = len(result.text.encode()) if result.changed else size
        kept = replace_text(record, text_field, result.text) | result.added
        file.keep(json_line(kept), size, size_out)


def run_clean(
    options: CleanOptions,
    inputs: Sequence[Input],
    output: Path,
    executor: Executor,
    provenance: Mapping[str, Any],
) -> Json:
    """Filter all inputs into a stage and return its `stage.json`; resume an unfinished stage."""
    phase = _clean_phase(options, inputs, output)
    if exists(output / STAGE_MANIFEST):
        published = read_stage(output).manifest
        if published["inputs"] == phase.inputs:
            tally = Tally.from_records([published["reading"]])
            check_bad_fraction(inputs, tally, options.rules)  # the limit may have changed
            return published
        raise ConfigError(
            f"{output}: is already a stage, from other inputs or filters. Choose another "
            "directory, or remove this one."
        )
    (output / FILE_RECORDS).mkdir(parents=True, exist_ok=True)
    records = run_phase(phase, executor)
    tally = Tally.from_records([record["reading"] for record in records])
    check_bad_fraction(inputs, tally, options.rules)
    require_unchanged(inputs)
    shutil.rmtree(output / FILE_RECORDS)
    entries = [entry for record in records for entry in record["entries"]]
    if options.keep_dropped is not None:
        remove_unlisted_files(options.keep_dropped, {entry["file"] for entry in entries})
    return publish_stage(
        output,
        "clean",
        entries,
        inputs=phase.inputs,
        text_field=options.rules.text_field,
        counts=merge_counts(records),
        options={"filters": list(options.filters)},
        provenance=provenance,
        reading=tally.record(),
    )


def _clean_phase(options: CleanOptions, inputs: Sequence[Input], output: Path) -> Phase:
    """Return the phase that filters the documents and writes the files."""
    units = plan_units(inputs, options.unit_bytes)
    labels = [_unit_label(inputs, unit) for unit in units]
    filters = [options.filters, filters_identity(options.filters)]
    layout = [units, options.piece_bytes, options.keep_dropped]
    key = fingerprint([inputs_fingerprint(inputs, options.rules), filters, layout])
    task = CleanTask(tuple(inputs), tuple(units), options, output, key)
    return Phase("clean", output, len(units), task, key, labels)


def _unit_label(inputs: Sequence[Input], unit: WorkUnit) -> str:
    first = unit.ranges[0]
    more = f" and {len(unit.ranges) - 1} more" if len(unit.ranges) > 1 else ""
    return f"{inputs[first.input].name} from {first.start:,}{more}"


@lru_cache(1)
def _build_once(filters: str) -> Filters:
    """Build filters from JSON; cached, because loading a filter's model takes about a second."""
    return build_filters(json.loads(filters))
