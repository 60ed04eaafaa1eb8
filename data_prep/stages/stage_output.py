"""What a task writes of its documents: those that go on, notes on the others, and counts of both.

`clean`, `dedup` and `decontaminate` each judge documents one after the other; here is what they
have in common, from the first file to `stage.json`. Knows nothing of why a document goes on or not.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data_prep.phases import RECORDS
from data_prep.stage_counts import Counts, merge_counts
from data_prep.stage_files import (
    STAGE,
    StageWriter,
    is_stage,
    publish_stage,
    read_lines,
    read_stage,
    stage_file,
)
from zerolm.errors import ConfigError

WORK = "work"  # of a stage in the making; removed when it is published
LEFT_OUT = "left-out"

Json = dict[str, Any]


class Sieve:
    """A file of the stage, and one beside it for what is left out; both whole or not there.

    As a context manager it removes them when left by an exception, and otherwise needs `close`.

    Args:
        output: directory of the stage.
        kept, left_out: the files; None where nothing is to be noted of what is left out.
    """

    def __init__(self, output: Path, kept: Path, left_out: Path | None):
        self.output, self.counts = output, Counts()
        self.kept = StageWriter(kept)
        self.left_out = None if left_out is None else StageWriter(left_out)

    def keep(self, line: bytes, size_in: int, size_out: int) -> None:
        """Write a document on; a line of JSON and the sizes of its text, as it was and is."""
        self.counts.came_in(size_in)
        self.counts.went_out(size_out)
        self.kept.write_line(line, size_out)

    def leave_out(self, reason: str, size: int, name: Any, shown: str, note: Json) -> None:
        """Count a document that does not go on, and note why.

        Args:
            name: its id.
            shown: of its text, as an example.
        """
        self.counts.came_in(size)
        self.counts.dropped(reason, size, name, shown)
        if self.left_out is not None:
            self.left_out.write(note, 0)

    def close(self) -> Json:
        """Publish the files, and return counts, `entry` of the stage's file, and all `files`."""
        files = {}
        if self.left_out is not None:
            size = self.left_out.close()["size_bytes"]
            files[os.path.relpath(self.left_out.path, self.output)] = size
        entry = self.kept.close()
        files[entry["file"]] = entry["size_bytes"]
        return {"files": files, "entry": entry, **self.counts.record()}

    def __enter__(self) -> "Sieve":
        return self

    def __exit__(self, *_: object) -> None:
        self.kept.abort()
        if self.left_out is not None:
            self.left_out.abort()


def begin_stage(output: Path, name: str, inputs: str) -> Json | None:
    """Return `stage.json` if the stage is there; else make way for it.

    Raises:
        ConfigError: another stage is there.
    """
    if not is_stage(output):
        return None
    manifest = read_stage(output).manifest
    if manifest["stage"] == name and manifest["inputs"] == inputs:
        shutil.rmtree(output / WORK, ignore_errors=True)
        return manifest
    if manifest["stage"] != name:
        raise ConfigError(
            f"{output}: is the stage {manifest['stage']!r}, not {name!r}. Give another directory."
        )
    (output / STAGE).unlink()  # of other options or inputs
    return None


def _keep_records(output: Path) -> None:
    """Move the records of all phases beside those that stay: they say what took how long."""
    for phase in (output / WORK / RECORDS).glob("*"):
        kept = output / RECORDS / phase.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(exist_ok=True)
        phase.rename(kept)


def join_files(paths: Iterable[Path], target: Path) -> Json:
    """Write the lines of tasks' files into one, and return its entry for `stage.json`."""
    with StageWriter(target) as writer:
        for path in paths:
            for line in read_lines(path):
                writer.write_line(line, 0)
        return writer.close()


def sieve_of(output: Path, task: int) -> Sieve:
    """Return what a task writes, whose records are to be given to `publish_judged`."""
    return Sieve(output, output / stage_file(task), output / WORK / LEFT_OUT / stage_file(task))


def publish_judged(
    output: Path,
    stage: str,
    documents: Any,
    records: Sequence[Json],
    *,
    left_out: str,
    inputs: str,
    options: Json,
    before: Json,
    **more: Any,
) -> Json:
    """Join the notes on what was left out, publish a stage, and return its `stage.json`.

    Args:
        documents: stage_documents.Documents.
        records: of the tasks: what their `Sieve` gave, and a `tally`.
        left_out: name of the file of the notes.

    Raises:
        ConfigError: too much of the input was bad.
    """
    tally = documents.left_out(records)
    notes = [output / WORK / LEFT_OUT / stage_file(task) for task in range(len(records))]
    published = publish_stage(
        output,
        stage,
        [record["entry"] for record in records],
        inputs=inputs,
        text_field=documents.text_field,
        counts=merge_counts(records),
        options=options,
        before=before,
        skipped_documents=dict(tally.skipped),
        bad_documents=dict(tally.bad),
        left_out=join_files(notes, output / left_out),
        **more,
    )
    _keep_records(output)
    shutil.rmtree(output / WORK, ignore_errors=True)
    return published
