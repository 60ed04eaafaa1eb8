"""Output of a stage's tasks: kept documents, notes on dropped documents, and their counts.

`clean`, `dedup` and `decontaminate` each decide on one document at a time; this module contains the
code that they share, from a task's first file to `stage.json`.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.read.stage_files import (
    STAGE_MANIFEST,
    StageWriter,
    is_stage,
    publish_stage,
    read_stage,
    read_stage_lines,
    stage_file,
)
from data_prep.stages.counts import Counts, merge_counts
from data_prep.stages.documents import Documents, StageInput
from data_prep.tasks.phases import RECORDS, Executor, Phase, Record, fingerprint, run_phase
from zerolm.common.errors import ConfigError

WORK = "work"  # directory in an unfinished stage, removed when the stage is published
DROPPED_NOTES = "left-out"  # in WORK

Json = dict[str, Any]


class StageOutput:
    """Writes a file of a stage and a file with notes on dropped documents, both completely or not
    at all.

    As a context manager, it removes both on exit unless `close` was called.

    Args:
        kept, notes: paths of the files; `notes` is None if dropped documents are only counted.
    """

    def __init__(self, output: Path, kept: Path, notes: Path | None):
        self.output, self.counts = output, Counts()
        self.kept = StageWriter(kept)
        self.notes = None if notes is None else StageWriter(notes)

    def keep(self, line: bytes, text_bytes_in: int, text_bytes_out: int) -> None:
        """Write a kept document.

        Args:
            line: the document as JSON, without a newline.
            text_bytes_in, text_bytes_out: size of the text as read and as written, in UTF-8.
        """
        self.counts.add_input(text_bytes_in)
        self.counts.add_output(text_bytes_out)
        self.kept.write_line(line, text_bytes_out)

    def drop(self, reason: str, text_bytes: int, document_id: Any, shown: str, note: Json) -> None:
        """Count a dropped document, and write a note on it."""
        self.counts.add_input(text_bytes)
        self.counts.add_dropped(reason, text_bytes, document_id, shown)
        self.note(note)

    def note(self, note: Json) -> None:
        """Write a note on a document."""
        if self.notes is not None:
            self.notes.write(note, 0)

    def close(self) -> Json:
        """Publish the files; return the counts, the stage file's `entry`, and the sizes of all
        `files`.
        """
        files = {}
        if self.notes is not None:
            size = self.notes.close()["size_bytes"]
            files[os.path.relpath(self.notes.path, self.output)] = size
        entry = self.kept.close()
        files[entry["file"]] = entry["size_bytes"]
        return {"files": files, "entry": entry, **self.counts.record()}

    def __enter__(self) -> "StageOutput":
        return self

    def __exit__(self, *_: object) -> None:
        self.kept.abort()
        if self.notes is not None:
            self.notes.abort()


def task_output(output: Path, task: int) -> StageOutput:
    """Return the output for a task; `StageRun.write` receives the records of all tasks."""
    name = stage_file(task)
    return StageOutput(output, output / name, output / WORK / DROPPED_NOTES / name)


class StageRun:
    """A run of a stage whose documents are divided into tasks; an interrupted run is resumed.

    Attributes:
        published: the content of `stage.json` if the stage is already published, else None. If the
            output contains a stage with other inputs or options, starting a run unpublishes that
            stage.
    """

    def __init__(
        self,
        name: str,
        options: Json,
        identity: Json,
        given: StageInput,
        output: Path,
        executor: Executor,
    ):
        self.name, self.options, self.given = name, options, given
        self.output, self.work, self.executor = output, output / WORK, executor
        self.key = fingerprint([given.fingerprint, identity])
        self.published = self._published()

    @cached_property
    def documents(self) -> Documents:
        documents = self.given.documents.bounded(self.work / "read", self.executor)
        self.work.mkdir(parents=True, exist_ok=True)
        return documents

    def _published(self) -> Json | None:
        if not is_stage(self.output):
            return None
        manifest = read_stage(self.output).manifest
        if manifest["stage"] != self.name:
            raise ConfigError(
                f"{self.output}: is the stage {manifest['stage']!r}, not {self.name!r}. Give "
                f"another directory."
            )
        if manifest["inputs"] == self.key:
            shutil.rmtree(self.work, ignore_errors=True)
            return manifest
        self.withdraw()
        return None

    def withdraw(self) -> None:
        """Turn the output into an unfinished stage."""
        (self.output / STAGE_MANIFEST).unlink()

    def phase(
        self, name: str, num_tasks: int, task: Callable[[int], Record], is_last: bool = False
    ) -> list[Record]:
        """Run a phase; the last phase writes to `output`, and all earlier phases to `work`."""
        labels = self.documents.labels if num_tasks == self.documents.num_tasks else ()
        inputs = fingerprint([self.key, num_tasks, getattr(task, "num_partitions", 0)])
        directory = self.output if is_last else self.work
        phase = Phase(f"{self.name}.{name}", directory, num_tasks, task, inputs, labels)
        return run_phase(phase, self.executor)

    def write(self, name: str, task: Callable[[int], Record], notes: str, **more: Any) -> Json:
        """Run the last phase, join the notes on dropped documents, and publish the stage.

        Args:
            task: function whose result contains the result of `StageOutput.close` and a `tally`.
            more: additional keys of `stage.json`; a value may be a function of the task records.
        """
        records = self.phase(name, self.documents.num_tasks, task, is_last=True)
        tally = self.documents.total_tally(records)
        directory = self.work / DROPPED_NOTES
        published = publish_stage(
            self.output,
            self.name,
            [record["entry"] for record in records],
            inputs=self.key,
            text_field=self.documents.text_field,
            counts=merge_counts(records),
            options=self.options,
            provenance=self.given.provenance,
            skipped_documents=dict(tally.skipped),
            bad_documents=dict(tally.bad),
            left_out=_join_files(
                [directory / stage_file(task) for task in range(len(records))], self.output / notes
            ),
            **{key: value(records) if callable(value) else value for key, value in more.items()},
        )
        _keep_records(self.output)
        shutil.rmtree(self.work, ignore_errors=True)
        return published


def _join_files(paths: Iterable[Path], target: Path) -> Json:
    """Concatenate the tasks' files into one file, and return the file's entry for `stage.json`."""
    with StageWriter(target) as writer:
        for path in paths:
            for line in read_stage_lines(path):
                writer.write_line(line, 0)
        return writer.close()


def _keep_records(output: Path) -> None:
    """Move the task records out of WORK, because the report shows the tasks' durations."""
    for phase in (output / WORK / RECORDS).glob("*"):
        kept = output / RECORDS / phase.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(exist_ok=True)
        phase.rename(kept)
