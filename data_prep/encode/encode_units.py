"""Encodes units of the input into parts, as the tasks of the phase `tokenize.encode`.

A task reads its unit from the input files and writes parts (`data_prep.encode.parts`); only the
task's record is sent to other processes. The content of parts depends only on the documents and the
tokenizer.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.encode import parts
from data_prep.encode.encode_documents import DocumentEncoder, IdCounts
from data_prep.files.documents import Document, InputRules, Position
from data_prep.read.bad_input import Tally
from data_prep.read.readers import Input
from data_prep.read.work_units import (
    WorkUnit,
    default_unit_bytes,
    divide_last_units,
    plan_units,
    read_batches,
)
from data_prep.tasks.progress import TaskProgress
from data_prep.tokenizer.encoders import Encoder
from zerolm.common.errors import ZerolmError
from zerolm.common.files import attempt_token

READ_BYTES = 1 << 20  # size of the text parsed and encoded at a time
PART_SECONDS = 15.0  # CPU time per part, and the most work that a killed task repeats
MIN_UNIT_BYTES = 1 << 23  # a unit's overhead is 1 ms of CPU, as for encoding 100 KB with gigatoken
ENCODED_DIRECTORY = "encoded"  # subdirectory of the parts directory
UNITS_PER_DIRECTORY = 64  # in `encoded/00000`, ...; every unit lists its directory


def units_of(inputs: Sequence[Input], unit_bytes: int | None) -> list[WorkUnit]:
    """Divide the inputs into work units of at least 8 MiB by default.

    The last units are smaller, so that all workers finish at about the same time.
    """
    if unit_bytes is not None:
        return plan_units(inputs, unit_bytes)
    units = plan_units(inputs, max(default_unit_bytes(inputs), MIN_UNIT_BYTES))
    return divide_last_units(units, inputs)


@dataclass(frozen=True)
class EncodeUnits:
    """Task i encodes unit i; its record lists the parts and counts the encoded and skipped input.

    Args:
        units: each unit with a fingerprint of everything that determines its parts; parts with a
            different fingerprint are removed.
        open_encoder: called once in each process.
        running: directory in which tasks record their progress.
    """

    directory: Path
    inputs: tuple[Input, ...]
    units: tuple[tuple[WorkUnit, str], ...]
    rules: InputRules
    open_encoder: Callable[[], Encoder]
    documents: DocumentEncoder
    running: Path
    part_seconds: float

    @cached_property
    def encoder(self) -> Encoder:
        """The process's encoder, which forked workers inherit."""
        return self.open_encoder()

    def load(self) -> None:
        """Load the encoder now."""
        assert self.encoder

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __call__(self, task: int) -> dict[str, Any]:
        """Encode a unit, resuming after its existing parts."""
        unit, fingerprint = self.units[task]
        name = f"{ENCODED_DIRECTORY}/{task // UNITS_PER_DIRECTORY:05d}"
        directory = self.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        records = parts.read_parts(directory, task, fingerprint)
        progress = TaskProgress(self.running / f"{task:05d}.running", unit.size_bytes)
        for record in records:
            progress.add(record["input_bytes"], *parts.part_counts(record))
        _UnitEncoder(self, task, directory, records, progress).encode()
        return {"fingerprint": fingerprint, **_unit_record(name, records)}


class _UnitEncoder:
    """Encodes the rest of a unit, appending the records of new parts to `records`."""

    def __init__(
        self,
        job: EncodeUnits,
        task: int,
        directory: Path,
        records: list[dict[str, Any]],
        progress: TaskProgress,
    ):
        self.job, self.task, self.directory = job, task, directory
        self.unit, self.fingerprint = job.units[task]
        self.records, self.progress = records, progress
        self.tally = Tally.from_records([record["tally"] for record in records[-1:]])
        self.position = Position(*records[-1]["position"]) if records else None
        self.writer = attempt_token()
        self._open_part()

    def encode(self) -> None:
        batches = read_batches(
            self.job.inputs, self.unit, self.job.rules, self.tally, READ_BYTES, self.position
        )
        try:
            for batch in batches:
                tokens = self._add(batch.documents) if batch.documents else 0
                self.counts["input_bytes"] += batch.input_bytes
                self.position = batch.next
                self.progress.add(batch.input_bytes, len(batch.documents), tokens)
                if time.monotonic() >= self.deadline or self.part.is_full:
                    self._close_part(last=False)
                    self._open_part()
            self._close_part(last=True)
        finally:
            self.part.abort()

    def _open_part(self) -> None:
        name = parts.part_name(self.task, len(self.records), self.writer)
        self.part = parts.PartWriter(self.directory, name, self.job.documents.num_splits)
        self.counts = dict.fromkeys(("input_bytes", "no_tokens", *IdCounts._fields), 0)
        self.encoded_before = Counter(self.job.encoder.counts)
        self.deadline = time.monotonic() + self.job.part_seconds

    def _add(self, documents: Sequence[Document]) -> int:
        """Encode documents into the current part, and return their number of tokens."""
        try:
            batches, counts = self.job.documents.encode(self.job.encoder, documents)
        except ZerolmError as error:
            number = getattr(error, "document", None)
            if number is None:
                raise
            document = documents[number]
            name = self.job.inputs[document.input].name
            raise ZerolmError(f"{name} (at {document.start:,}): {error}") from error
        num_tokens = num_documents = 0
        for split, batch in enumerate(batches):
            self.part.add(split, batch)
            num_tokens += len(batch.token_ids)
            num_documents += len(batch.lengths)
        self.counts["no_tokens"] += len(documents) - num_documents
        for name, number in counts._asdict().items():
            self.counts[name] += number
        return num_tokens

    def _close_part(self, last: bool) -> None:
        self.records.append(
            self.part.close(
                self.records[-1]["name"] if self.records else None,
                last,
                fingerprint=self.fingerprint,
                position=self.position,
                tally=self.tally.record(),
                encoded=dict(self.job.encoder.counts - self.encoded_before),
                **self.counts,
            )
        )


def _unit_record(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of an encoded unit: totals over its parts, and their files."""
    splits: list[dict[str, int]] = []
    for entries in zip(*(part["splits"] for part in records), strict=True):
        keys = ("num_documents", "num_tokens", "text_bytes")
        splits.append({key: sum(entry[key] for entry in entries) for key in keys})
    encoded: Counter[str] = Counter()
    for part in records:
        encoded.update(part["encoded"])
    no_tokens = sum(part["no_tokens"] for part in records)
    tally = records[-1]["tally"]
    skipped = Counter(tally["skipped"]) + Counter({"no_tokens": no_tokens})
    return {
        "files": {
            f"{name}/{file}": size for part in records for file, size, _ in parts.part_files(part)
        },
        "parts": [
            [
                [f"{name}/{part['name']}.{split}.ids", entry["num_documents"], entry["num_tokens"]]
                for part in records
                if (entry := part["splits"][split])["num_documents"]
            ]
            for split in range(len(splits))
        ],
        "checksums": [checksum for part in records for _, _, checksum in parts.part_files(part)],
        "splits": splits,
        "tally": tally,
        "skipped": dict(skipped),
        "encoded": dict(encoded),
        **{name: sum(part[name] for part in records) for name in IdCounts._fields},
        "documents_in": tally["documents_in"],
        "documents_out": sum(split["num_documents"] for split in splits),
        "dropped": dict(skipped + Counter(tally["bad"])),
    }
