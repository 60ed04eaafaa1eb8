"""Parts: encoded documents on disk, between the tasks that encode and those that make shards.

A part is what a task has made of some of its documents, for training (split 0) and for validation
(split 1): `NAME.0.ids` has token ids as shards have them, `NAME.0.docs` a length and an origin for
each document, and `NAME.json` says what is there and where in the input to go on. A task writes one
every `seconds` or so, so that it goes on inside of its input after it was killed. A part's name is
its writer's own, and each part names the one before: two writers of a unit, such as a task that
Slurm has started again while the first still ends, never mix.

Nothing is synced: what a power cut or a failing disk does to a part is found by its checksums
before it is used again, and the part is made again.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from zerolm.files import host_name

COPY_BYTES = 1 << 22
DOCUMENT = np.dtype([("tokens", "<u8"), ("origin", "<u8")])
MAX_DOCUMENTS = 1 << 22  # of a part: 64 MiB of memory
MAX_BYTES = 1 << 30  # of a part


class Batch(NamedTuple):
    """Encoded documents of one split."""

    token_ids: np.ndarray  # (N,) of the shards' dtype, each document ending in the EOS id
    lengths: np.ndarray  # (D,) integers
    origins: np.ndarray  # (D,) integers; zerolm/origins.py says which
    text_bytes: int


class PartWriter:
    """Writes the part `directory/NAME` (`part_name`); nothing of it counts before `close`."""

    def __init__(self, directory: Path, name: str, num_splits: int):
        self.directory, self.name = directory, name
        self.num_tokens = self.num_documents = self.num_bytes = 0
        self._splits = [_SplitWriter(directory / f"{name}.{split}") for split in range(num_splits)]

    def add(self, split: int, batch: Batch) -> None:
        """Append documents to a split."""
        if len(batch.lengths):
            self._splits[split].add(batch)
            self.num_tokens += len(batch.token_ids)
            self.num_documents += len(batch.lengths)
            self.num_bytes += batch.token_ids.nbytes

    @property
    def is_full(self) -> bool:
        """Whether it should be closed, so that memory and the copies of it stay bounded."""
        return self.num_documents >= MAX_DOCUMENTS or self.num_bytes >= MAX_BYTES

    def close(self, previous: str | None, **more: Any) -> dict[str, Any]:
        """Finish the part with a record of what is in it and of `more`, which is returned.

        Args:
            previous: name of the part before; None of the first.
        """
        splits = [each.close() for each in self._splits]
        record = {"name": self.name, "previous": previous, "splits": splits, **more}
        path = self.directory / f"{self.name}.json"
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        os.replace(temporary, path)
        return record

    def abort(self) -> None:
        """Close the files; what is in them is left for the next writer to overwrite."""
        for each in self._splits:
            each.abort()


class _SplitWriter:
    def __init__(self, stem: Path):
        self.ids, self.docs = (
            stem.with_name(stem.name + ".ids"),
            stem.with_name(stem.name + ".docs"),
        )
        self.file: BinaryIO | None = None
        self.digest = xxhash.xxh3_64()
        self.documents: list[np.ndarray] = []
        self.num_tokens = self.text_bytes = 0

    def add(self, batch: Batch) -> None:
        if self.file is None:
            self.file = open(self.ids, "wb", buffering=1 << 17)
        data = batch.token_ids.data.cast("B")
        self.file.write(data)
        self.digest.update(data)
        rows = np.empty(len(batch.lengths), DOCUMENT)
        rows["tokens"], rows["origin"] = batch.lengths, batch.origins
        self.documents.append(rows)
        self.num_tokens += len(batch.token_ids)
        self.text_bytes += batch.text_bytes

    def close(self) -> dict[str, Any]:
        rows = np.concatenate(self.documents) if self.documents else np.empty(0, DOCUMENT)
        size = 0
        if self.file is not None:
            size = self.file.tell()
            self.file.close()
            self.docs.write_bytes(rows.tobytes())
        return {
            "num_tokens": self.num_tokens,
            "num_documents": len(rows),
            "text_bytes": self.text_bytes,
            "ids_bytes": size,
            "ids_xxh3": self.digest.hexdigest(),
            "docs_xxh3": xxhash.xxh3_64_hexdigest(rows.tobytes()),
        }

    def abort(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # a full disk: what is buffered cannot be flushed
                self.file.close()


def files_of(record: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Yield (name, size in bytes, checksum) of the files of a part."""
    for split, each in enumerate(record["splits"]):
        if each["num_documents"]:
            stem = f"{record['name']}.{split}"
            yield f"{stem}.ids", each["ids_bytes"], each["ids_xxh3"]
            yield f"{stem}.docs", each["num_documents"] * DOCUMENT.itemsize, each["docs_xxh3"]


def counts_of(record: dict[str, Any]) -> tuple[int, int]:
    """Return how many documents and tokens a part has."""
    splits = record["splits"]
    return sum(each["num_documents"] for each in splits), sum(each["num_tokens"] for each in splits)


def is_whole(directory: Path, record: dict[str, Any]) -> bool:
    """Say whether the files of a part are as they were written; all of them are read."""
    return all(
        _checksum(directory / name, size) == checksum for name, size, checksum in files_of(record)
    )


def are_whole(directory: Path, record: dict[str, Any]) -> bool:
    """Say the same of the `files` of a record, which has their `checksums` in the same order."""
    return all(
        _checksum(directory / name, size) == checksum
        for (name, size), checksum in zip(record["files"].items(), record["checksums"], strict=True)
    )


def _checksum(path: Path, size: int) -> str | None:
    """Return the XXH3 of a file; None if it is missing or has another size."""
    digest = xxhash.xxh3_64()
    try:
        if path.stat().st_size != size:
            return None
        with open(path, "rb") as file:
            while block := file.read(COPY_BYTES):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def part_name(number: int, writer: str) -> str:
    """Return the name of a task's part; `writer` is `zerolm.files.attempt_token()` of this go."""
    return f"{number:05d}-{writer}"


def read_parts(directory: Path, fingerprint: str) -> list[dict[str, Any]]:
    """Return the records of a task's whole parts, from the first on.

    What else is there is removed, but for what another process may still be writing.

    Args:
        fingerprint: of what the parts are made of; others' parts are removed.
    """
    records: dict[str, dict[str, Any]] = {}
    others: set[str] = set()
    for path in directory.glob("*.json"):
        try:
            record = json.loads(path.read_bytes())
            if record["fingerprint"] == fingerprint:
                records[record["name"]] = record
            else:
                others.add(path.stem)
        except (OSError, ValueError, KeyError, TypeError):
            others.add(path.stem)
    found = _longest_chain(directory, records)
    kept = {record["name"] for record in found}
    for path in directory.iterdir():
        name = path.name.partition(".")[0]
        if name not in kept and (name in others or _has_ended(name)):
            path.unlink(missing_ok=True)
    return found


def _longest_chain(directory: Path, records: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parts that each go on where the one before ends, of one writer or of several."""
    whole: dict[str, bool] = {}
    for name in sorted(records, reverse=True):  # by their numbers
        chain: list[dict[str, Any]] = []
        at: str | None = name
        while at is not None and at in records:
            if at not in whole:
                whole[at] = is_whole(directory, records[at])
            if not whole[at]:
                break
            chain.insert(0, records[at])
            at = records[at]["previous"]
        if at is None:
            return chain
    return []


def _has_ended(name: str) -> bool:
    """Say whether the writer of a part is known to write no more: a process of this machine."""
    match = re.fullmatch(r"\d+-(.*)-(\d+)-[0-9a-f]{8}", name)
    if match is None or match[1] != host_name():
        return match is None
    if int(match[2]) == os.getpid():
        return True  # a task at a time, so it is one that has failed
    try:
        os.kill(int(match[2]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


@dataclass(frozen=True)
class Slice:
    """Some documents of a part that follow each other."""

    part: str  # path without .ids and .docs
    first_document: int
    last_document: int  # the one behind
    first_token: int
    last_token: int


def plan_shards(
    parts: Iterable[tuple[str, int, int]], shard_tokens: int
) -> Iterator[tuple[int, Slice]]:
    """Yield (number of the shard, what it has next): the same documents, however they lie in parts.

    A shard ends before the document with which it would exceed `shard_tokens`; a document that is
    longer than that has a shard of its own. What is yielded does not depend on the parts behind.

    Args:
        parts: path without .docs, number of documents, and of tokens of each.
    """
    number, is_empty, room = 0, True, shard_tokens
    for path, num_documents, num_tokens in parts:
        first = start = 0
        ends = None
        while first < num_documents:
            if num_tokens - start <= room:
                last, stop = num_documents, num_tokens
            else:
                if ends is None:
                    ends = np.cumsum(np.fromfile(f"{path}.docs", DOCUMENT)["tokens"]).astype(int)
                last = int(np.searchsorted(ends, start + room, side="right"))
                if last <= first and not is_empty:  # not even one document fits
                    number, is_empty, room = number + 1, True, shard_tokens
                    continue
                last = max(last, first + 1)
                stop = int(ends[last - 1])
            yield number, Slice(path, first, last, start, stop)
            is_empty = False
            room -= stop - start
            first, start = last, stop
