"""Parts to shards: each task copies exact slices of parts into one shard, and hashes it on the way.

The limits of shards follow from the lengths of documents alone (data_prep/parts.py), so a shard's
bytes do not depend on how the documents lay in parts.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.parts import COPY_BYTES, DOCUMENT, Slice, plan_shards
from data_prep.phases import Record
from zerolm.block_sums import SUMS_SUFFIX, BlockSums
from zerolm.files import sha256_file, temporary_name
from zerolm.manifest import files_of

SYNCED_BYTES = 1 << 24


@dataclass(frozen=True)
class Shard:
    """One shard that is to be made."""

    directory: Path
    number: int
    slices: tuple[Slice, ...]

    @property
    def name(self) -> str:
        """Its files' name without their suffixes."""
        return f"shard-{self.number:05d}"


def plan(
    directory: Path, parts: Path, records: Sequence[Record], split: int, shard_tokens: int
) -> list[Shard]:
    """Return the shards of a split of all units, which are in the records of `EncodeUnits`."""
    made_of = [
        (str((parts / name).absolute()), num_documents, num_tokens)
        for record in records
        for name, num_documents, num_tokens in record["parts"][split]
    ]
    return [
        Shard(directory, number, tuple(slices))
        for number, slices in enumerate(plan_shards(made_of, shard_tokens))
    ]


def is_whole(shard: Shard, entry: dict[str, Any]) -> bool:
    """Say whether the files of a shard are as they were written; all of them are read."""
    return all(sha256_file(shard.directory / name) == sha256 for name, _, sha256 in files_of(entry))


def remove_others(directories: Sequence[Path], shards: Sequence[Shard]) -> None:
    """Remove all shards in some directories but for these, and what was never finished."""
    kept = {(shard.directory, shard.name) for shard in shards}
    for directory in directories:
        for path in directory.glob("shard-*"):
            if path.suffix == ".tmp" or (directory, path.name.partition(".")[0]) not in kept:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class AssembleShards:
    """Task j makes shard j; its record has the shard's entry of the manifest.

    Args:
        token_bytes: of an id in the parts and in the shards.
        relative_to: where names of files in the record begin.
    """

    shards: tuple[Shard, ...]
    token_bytes: int
    relative_to: Path

    def __call__(self, task: int) -> dict[str, Any]:
        """Write the files of a shard; `OSError` as writing raises it."""
        shard = self.shards[task]
        lengths, origins = _read_documents(shard.slices)
        stem = shard.directory / shard.name
        sums = BlockSums()
        size, sha256 = _write(
            stem.with_suffix(".bin"), _token_blocks(shard.slices, self.token_bytes), sums.update
        )
        entry: dict[str, Any] = {
            "file": f"{shard.name}.bin",
            "num_tokens": size // self.token_bytes,
            "num_documents": len(lengths),
            "size_bytes": size,
            "sha256": sha256,
        }
        ends = np.cumsum(lengths, dtype="<u8")
        for key, suffix, content in (
            ("index", ".idx", ends.tobytes()),
            ("origins", ".org", origins.astype("<u8").tobytes()),
            ("sums", SUMS_SUFFIX, sums.content()),
        ):
            size, sha256 = _write(stem.with_suffix(suffix), iter([content]))
            entry[key] = shard.name + suffix
            entry[f"{key}_size_bytes"] = size
            entry[f"{key}_sha256"] = sha256
        written = [shard.directory / name for name, _, _ in files_of(entry)]
        return {
            "shard": entry,
            "files": {
                os.path.relpath(path, self.relative_to): path.stat().st_size for path in written
            },
            "documents_out": len(lengths),
        }


def _read_documents(slices: Sequence[Slice]) -> tuple[np.ndarray, np.ndarray]:
    rows = np.concatenate(
        [
            np.fromfile(
                f"{each.part}.docs",
                DOCUMENT,
                count=each.last_document - each.first_document,
                offset=each.first_document * DOCUMENT.itemsize,
            )
            for each in slices
        ]
    )
    return rows["tokens"], rows["origin"]


def _token_blocks(slices: Sequence[Slice], token_bytes: int) -> Iterator[memoryview]:
    """Yield the ids of slices in blocks, each valid until the next one is asked for."""
    buffer = memoryview(bytearray(COPY_BYTES))
    for each in slices:
        left = (each.last_token - each.first_token) * token_bytes
        with open(f"{each.part}.ids", "rb", buffering=0) as file:
            file.seek(each.first_token * token_bytes)
            while left:
                count = file.readinto(buffer[: min(left, COPY_BYTES)])
                if not count:
                    raise EOFError(f"{each.part}.ids ends {left} bytes too early")
                left -= count
                yield buffer[:count]


def _write(
    path: Path,
    blocks: Iterator[Any],
    also: Callable[[Any], object] | None = None,
) -> tuple[int, str]:
    """Write a file under a temporary name and rename it; return its size and SHA-256.

    Large ones are synced here, where other tasks go on meanwhile, and all of them before the
    manifest is published.
    """
    digest = hashlib.sha256()
    size = 0
    temporary = temporary_name(path)
    with open(temporary, "wb", buffering=0) as file:
        for block in blocks:
            _write_all(file, block)
            digest.update(block)
            size += len(block)
            if also is not None:
                also(block)
        if size >= SYNCED_BYTES:
            os.fsync(file.fileno())
    os.replace(temporary, path)
    return size, digest.hexdigest()


def _write_all(file: Any, block: Any) -> None:
    view = memoryview(block)
    while view:
        view = view[file.write(view) :]
