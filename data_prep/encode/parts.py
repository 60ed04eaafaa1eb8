"""Parts: intermediate files of encoded documents, from which shards are assembled.

A part contains consecutive documents of a unit, divided into training (split 0) and validation
(split 1). `NAME.0.ids` contains token ids in the format of shards, followed by a length and an
origin for
each document. `NAME.json` contains counts, checksums, and the input position where the next part
begins. A task writes a part every few seconds, so a killed task resumes in the middle of its
input. Each writer uses unique names and each part names the previous one, so two writers of a unit
cannot mix their parts (Slurm may restart a task before the first attempt has exited).

Creating a file or a directory takes as long as encoding 20 KB of text. Therefore several units
share a directory, and the last part of a unit has no `NAME.json`: the task's record contains the
same
information.

Parts are not synced to disk. Before a part is reused, its checksums are verified to detect damage
from a power cut or a failing disk; a damaged part is encoded again.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

import numpy as np
import xxhash

from zerolm.common.errors import RecordError
from zerolm.common.files import host_name, write_atomically
from zerolm.common.records import Count, Name, read_record

READ_BYTES = 1 << 22
DOCUMENT_DTYPE = np.dtype([("tokens", "<u8"), ("origin", "<u8")])
MAX_PART_DOCUMENTS = 1 << 22  # 64 MiB of memory
MAX_PART_BYTES = 1 << 30


class Batch(NamedTuple):
    """Encoded documents of one split."""

    token_ids: np.ndarray  # (N,) ids in the shards' dtype; each document ends with the EOS id
    lengths: np.ndarray  # (D,) integers, in tokens
    origins: np.ndarray  # (D,) integers; see `zerolm.shards.origins`
    text_bytes: int  # size of the documents in UTF-8


class PartWriter:
    """Writes the files of the part `directory/NAME`; the part exists once `close` has returned."""

    def __init__(self, directory: Path, name: str, num_splits: int):
        self.directory, self.name = directory, name
        self.num_documents = self.num_bytes = 0
        self._splits = [_SplitWriter(directory / f"{name}.{split}") for split in range(num_splits)]

    def add(self, split: int, batch: Batch) -> None:
        """Append documents to a split."""
        if len(batch.lengths):
            self._splits[split].add(batch)
            self.num_documents += len(batch.lengths)
            self.num_bytes += batch.token_ids.nbytes

    @property
    def is_full(self) -> bool:
        """Whether the part should be closed, to limit memory use and file size."""
        return self.num_documents >= MAX_PART_DOCUMENTS or self.num_bytes >= MAX_PART_BYTES

    def close(self, previous: str | None, last: bool, **extra: Any) -> dict[str, Any]:
        """Finish the part and return its record; write the record to a file unless this is the last
        part.

        Args:
            previous: name of the previous part; None for the first part.
        """
        splits = [each.close() for each in self._splits]
        record = {"name": self.name, "previous": previous, "splits": splits, **extra}
        if not last:
            content = json.dumps(record, ensure_ascii=False).encode()
            write_atomically(self.directory / f"{self.name}.json", content, durable=False)
        return record

    def abort(self) -> None:
        """Close the files of an unfinished part; `read_parts` removes them later."""
        for each in self._splits:
            each.abort()


class _SplitWriter:
    def __init__(self, stem: Path):
        self.path = stem.with_name(stem.name + ".ids")
        self.file: BinaryIO | None = None
        self.digest = xxhash.xxh3_64()
        self.documents: list[np.ndarray] = []
        self.num_tokens = self.text_bytes = 0

    def add(self, batch: Batch) -> None:
        if self.file is None:
            self.file = open(self.path, "wb", buffering=1 << 17)
        data = batch.token_ids.data.cast("B")
        self.file.write(data)
        self.digest.update(data)
        rows = np.empty(len(batch.lengths), DOCUMENT_DTYPE)
        rows["tokens"], rows["origin"] = batch.lengths, batch.origins
        self.documents.append(rows)
        self.num_tokens += len(batch.token_ids)
        self.text_bytes += batch.text_bytes

    def close(self) -> dict[str, Any]:
        num_documents = size = 0
        if self.file is not None:
            rows = np.concatenate(self.documents)
            self.file.write(content := rows.tobytes())
            self.digest.update(content)
            num_documents, size = len(rows), self.file.tell()
            self.file.close()
        return {
            "num_tokens": self.num_tokens,
            "num_documents": num_documents,
            "text_bytes": self.text_bytes,
            "size_bytes": size,
            "xxh3": self.digest.hexdigest(),
        }

    def abort(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # buffered data cannot be flushed to a full disk
                self.file.close()


def part_files(record: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Yield (name, size in bytes, checksum) for each file of a part."""
    for split, each in enumerate(record["splits"]):
        if each["num_documents"]:
            yield f"{record['name']}.{split}.ids", each["size_bytes"], each["xxh3"]


def part_counts(record: dict[str, Any]) -> tuple[int, int]:
    """Return the number of documents and of tokens in a part."""
    splits = record["splits"]
    return sum(each["num_documents"] for each in splits), sum(each["num_tokens"] for each in splits)


def is_intact(directory: Path, record: dict[str, Any]) -> bool:
    """Return whether all files of a part match their checksums."""
    return all(
        _checksum(directory / name, size) == checksum for name, size, checksum in part_files(record)
    )


def is_record_intact(directory: Path, record: dict[str, Any]) -> bool:
    """Return whether all `files` listed in a unit's record match the record's `checksums`."""
    files, checksums = record["files"], record.get("checksums", [])
    return len(files) == len(checksums) and all(
        _checksum(directory / name, size) == checksum
        for (name, size), checksum in zip(files.items(), checksums, strict=True)
    )


def _checksum(path: Path, size: int) -> str | None:
    """Return a file's XXH3 hash, or None if the file cannot be read or does not have the given
    size.
    """
    digest = xxhash.xxh3_64()
    try:
        if path.stat().st_size != size:
            return None
        with open(path, "rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def part_name(unit: int, number: int, writer: str) -> str:
    """Return a part's name; `writer` is the `attempt_token()` of the task's current attempt."""
    return f"{unit:05d}-{number:05d}-{writer}"


class _Split(TypedDict):
    num_tokens: Count
    num_documents: Count
    text_bytes: Count
    size_bytes: Count
    xxh3: str


class _Part(TypedDict):
    name: Name
    previous: Name | None
    fingerprint: str
    splits: list[_Split]


class PartRecord(_Part, total=False):
    """The record of a part; its `tally` has the keys of `Tally.record`."""

    tally: dict[str, Any]


def read_parts(directory: Path, unit: int, fingerprint: str) -> list[dict[str, Any]]:
    """Return the records of a unit's intact parts in order, up to the first missing part.

    The unit's last part is not included, because it has no record file. All other files of the
    unit are removed, except files that another process may still be writing.

    Args:
        fingerprint: hash of everything that determines the parts; parts with a different hash are
            removed.
    """
    records: dict[str, dict[str, Any]] = {}
    unusable: set[str] = set()
    own = [path for path in directory.iterdir() if path.name.startswith(f"{unit:05d}-")]
    for path in own:
        if path.suffix != ".json":
            continue
        record = None
        with contextlib.suppress(RecordError):
            record = read_record(path, PartRecord)
        if record is not None and record["fingerprint"] == fingerprint:
            records[record["name"]] = dict(record)
        else:
            unusable.add(path.stem)
    chain = _longest_chain(directory, records)
    kept = {record["name"] for record in chain}
    for path in own:
        name = path.name.partition(".")[0]
        if name not in kept and (name in unusable or _has_ended(name)):
            path.unlink(missing_ok=True)
    return chain


def _longest_chain(directory: Path, records: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the longest chain of intact parts that starts with the first part.

    In a chain, each part names the previous part; different processes may have written the parts.
    """
    intact: dict[str, bool] = {}
    for name in sorted(records, reverse=True):  # the last part first
        chain: list[dict[str, Any]] = []
        at: str | None = name
        while at is not None and at in records and len(chain) < len(records):
            if at not in intact:
                intact[at] = is_intact(directory, records[at])
            if not intact[at]:
                break
            chain.insert(0, records[at])
            at = records[at]["previous"]
        if at is None:
            return chain
    return []


def _has_ended(name: str) -> bool:
    """Return whether the process that wrote a part ran on this machine and has ended."""
    match = re.fullmatch(r"\d+-\d+-(.*)-(\d+)-[0-9a-f]{8}", name)
    if match is None or match[1] != host_name():
        return match is None
    if int(match[2]) == os.getpid():
        return True  # this process runs one task at a time, so an earlier attempt has failed
    try:
        os.kill(int(match[2]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
