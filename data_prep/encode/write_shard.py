"""Writes a shard from slices of parts: copies the ids in blocks, hashing them in the same pass.

`data_prep.encode.shard_plan` determines which slices make up a shard.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.encode.parts import DOCUMENT_DTYPE
from data_prep.encode.shard_plan import Slice
from zerolm.common.files import temporary_path
from zerolm.shards.checksums import ShardChecksums, write_sidecars
from zerolm.shards.origins import ORIGINS_SUFFIX

BLOCK_BYTES = 1 << 19  # copied at a time; each block is hashed while it is in the CPU cache
SYNC_BYTES = 1 << 25  # written between two syncs


def write_shard(
    directory: Path, number: int, slices: Iterable[Slice], token_bytes: int
) -> dict[str, Any]:
    """Write a shard's files, and return its manifest entry."""
    stem = directory / f"shard-{number:05d}"
    checksums = ShardChecksums()
    documents: list[np.ndarray] = []
    buffer = memoryview(bytearray(BLOCK_BYTES))

    def blocks() -> Iterator[memoryview]:
        for each in slices:
            documents.append(_read_documents(each))
            yield from _token_blocks(each, token_bytes, buffer)

    size, sha256 = _write(stem.with_suffix(".bin"), blocks(), checksums.update)
    rows = np.concatenate(documents)
    contents = [
        ("index", ".idx", np.cumsum(rows["tokens"], dtype="<u8").tobytes()),
        ("origins", ORIGINS_SUFFIX, rows["origin"].astype("<u8").tobytes()),
        *checksums.contents(),
    ]
    return {
        "file": f"{stem.name}.bin",
        "num_tokens": size // token_bytes,
        "num_documents": len(rows),
        "size_bytes": size,
        "sha256": sha256,
        **write_sidecars(stem, contents, many_writers=True, durable=False),
    }


def _read_documents(each: Slice) -> np.ndarray:
    return np.fromfile(
        each.part,
        DOCUMENT_DTYPE,
        count=each.last_document - each.first_document,
        offset=each.rows_start + each.first_document * DOCUMENT_DTYPE.itemsize,
    )


def _token_blocks(each: Slice, token_bytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the ids of a slice in blocks; a block is valid only until the next is requested."""
    bytes_left = (each.last_token - each.first_token) * token_bytes
    with open(each.part, "rb", buffering=0) as file:
        file.seek(each.first_token * token_bytes)
        while bytes_left:
            count = file.readinto(buffer[: min(bytes_left, len(buffer))])
            if not count:
                raise EOFError(f"{each.part} ends {bytes_left} bytes too early")
            bytes_left -= count
            yield buffer[:count]


def _write(
    path: Path, blocks: Iterator[memoryview], on_block: Callable[[Any], object]
) -> tuple[int, str]:
    """Write a file under a temporary name, then rename it; return the file's size and SHA-256.

    Large files are synced while they are being written, in parallel with other work. `publish_all`
    syncs all files once more before it publishes the manifest.
    """
    digest = hashlib.sha256()
    size = synced = 0
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb", buffering=0) as file:
            for block in blocks:
                _write_all(file, block)
                digest.update(block)
                size += len(block)
                on_block(block)
                if size - synced >= SYNC_BYTES:
                    os.fdatasync(file.fileno())
                    synced = size
            if synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return size, digest.hexdigest()


def _write_all(file: Any, block: Any) -> None:
    view = memoryview(block)
    while view:
        view = view[file.write(view) :]
