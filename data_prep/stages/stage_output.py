"""Output of a stage's tasks: kept documents, notes on the dropped ones, and counts of both.

`clean`, `dedup` and `decontaminate` each decide on documents one after the other; this is what they
share, from a task's first file to `stage.json`.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
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
from data_prep.stages.documents import Documents
from data_prep.tasks.phases import RECORDS
from zerolm.common.errors import ConfigError

WORK = "work"  # of an unfinished stage; removed when the stage is published
DROPPED_NOTES = "left-out"  # in WORK

Json = dict[str, Any]


class StageOutput:
    """One file of a stage, and one of notes on dropped documents; both complete or absent.

    As a context manager it removes both unless `close` was called.

    Args:
        output: directory of the stage.
        kept, notes: the files; `notes` is None where dropped documents are only counted.
    """

    def __init__(self, output: Path, kept: Path, notes: Path | None):
        self.output, self.counts = output, Counts()
        self.kept = StageWriter(kept)
        self.notes = None if notes is None else StageWriter(notes)

    def keep(self, line: bytes, text_bytes_in: int, text_bytes_out: int) -> None:
        """Write a kept document.

        Args:
            line: the document as JSON, without a newline.
            text_bytes_in, text_bytes_out: size of its text as read and as written, in UTF-8.
        """
        self.counts.add_input(text_bytes_in)
        self.counts.add_output(text_bytes_out)
        self.kept.write_line(line, text_bytes_out)

    def drop(self, reason: str, text_bytes: int, document_id: Any, shown: str, note: Json) -> None:
        """Count a dropped document, and write a note on it.

        Args:
            shown: part of its text, as an example.
        """
        self.counts.add_input(text_bytes)
        self.counts.add_dropped(reason, text_bytes, document_id, shown)
        self.note(note)

    def note(self, note: Json) -> None:
        """Write a note on a document."""
        if self.notes is not None:
            self.notes.write(note, 0)

    def close(self) -> Json:
        """Publish the files, and return counts, `entry` of the stage's file, and all `files`."""
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
    """Return the output of a task; `publish_output` takes the records of all tasks."""
    name = stage_file(task)
    return StageOutput(output, output / name, output / WORK / DROPPED_NOTES / name)


def reuse_or_reset_stage(output: Path, stage: str, inputs: str) -> Json | None:
    """Return `stage.json` if the stage is published already.

    A stage of the same name from other inputs or options is no longer published after this call.
    """
    if not is_stage(output):
        return None
    manifest = read_stage(output).manifest
    if manifest["stage"] == stage and manifest["inputs"] == inputs:
        shutil.rmtree(output / WORK, ignore_errors=True)
        return manifest
    if manifest["stage"] != stage:
        raise ConfigError(
            f"{output}: is the stage {manifest['stage']!r}, not {stage!r}. Give another directory."
        )
    (output / STAGE_MANIFEST).unlink()
    return None


def publish_output(
    output: Path,
    stage: str,
    documents: Documents,
    records: Sequence[Json],
    *,
    notes: str,
    inputs: str,
    options: Json,
    provenance: Json,
    **more: Any,
) -> Json:
    """Join the notes on dropped documents, publish a stage, and return its `stage.json`.

    Args:
        documents: the input of the stage.
        records: of the tasks: what `StageOutput.close` returned, and a `tally`.
        notes: name of the file of the notes.
    """
    tally = documents.total_tally(records)
    task_notes = [output / WORK / DROPPED_NOTES / stage_file(task) for task in range(len(records))]
    published = publish_stage(
        output,
        stage,
        [record["entry"] for record in records],
        inputs=inputs,
        text_field=documents.text_field,
        counts=merge_counts(records),
        options=options,
        provenance=provenance,
        skipped_documents=dict(tally.skipped),
        bad_documents=dict(tally.bad),
        left_out=_join_files(task_notes, output / notes),
        **more,
    )
    _keep_records(output)
    shutil.rmtree(output / WORK, ignore_errors=True)
    return published


def _join_files(paths: Iterable[Path], target: Path) -> Json:
    """Write the lines of tasks' files into one, and return its entry for `stage.json`."""
    with StageWriter(target) as writer:
        for path in paths:
            for line in read_stage_lines(path):
                writer.write_line(line, 0)
        return writer.close()


def _keep_records(output: Path) -> None:
    """Move the task records out of WORK: the report shows their times."""
    for phase in (output / WORK / RECORDS).glob("*"):
        kept = output / RECORDS / phase.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(exist_ok=True)
        phase.rename(kept)
