"""Megatron-LM's indexed data sets: ids in PREFIX.bin, lengths and documents in PREFIX.idx.

    .idx   "MMIDIDX\\0\\0", uint64 version 1, uint8 code of the dtype, uint64 S, uint64 D + 1;
           int32 (S,) lengths of sequences; int64 (S,) their first bytes in the .bin;
           int64 (D + 1,) first sequence of each document, then S; with multimodal data, int8 (S,)

All little-endian. A document may have several sequences, which are joined. Source:
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.finished_shards.documents import piece_bounds
from data_prep.finished_shards.items import (
    InputFile,
    Items,
    ReadOptions,
    check_no_pointer,
    damaged,
)
from zerolm.common.errors import ConfigError

HEADER = struct.Struct("<9sQBQQ")
MAGIC, VERSION = b"MMIDIDX\0\0", 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
BLOCK_DOCUMENTS = 1 << 16


def find(path: Path, options: ReadOptions) -> list[InputFile]:
    """Open the data set PREFIX, given as PREFIX, PREFIX.bin or PREFIX.idx, or all data sets in a
    directory.
    """
    if path.is_dir():
        indices = sorted(path.glob("*.idx"))
        if not indices:
            raise ConfigError(f"{path}: contains no .idx file. Give the prefix of PREFIX.idx.")
        return [_open(index) for index in indices]
    name = path.name.removesuffix(".bin").removesuffix(".idx")
    return [_open(path.with_name(name + ".idx"))]


def _open(index: Path) -> InputFile:
    binary = index.with_suffix(".bin")
    for file in (index, binary):
        if not file.is_file():
            raise ConfigError(f"{file}: no such file. Give the prefix of PREFIX.bin and .idx.")
        check_no_pointer(file)
    size = index.stat().st_size
    with open(index, "rb") as opened:
        header = opened.read(HEADER.size)
    if header[:9] != MAGIC:
        raise ConfigError(f"{index}: does not begin with {MAGIC!r}, so it is not a Megatron index.")
    if len(header) < HEADER.size:
        raise damaged(index, f"ends after {size} bytes")
    _, version, code, num_sequences, num_ends = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise ConfigError(
            f"{index}: has version {version} and dtype code {code}, but only version {VERSION} and "
            f"the integer codes {', '.join(map(str, DTYPES))} are supported."
        )
    dtype = np.dtype(DTYPES[code])
    expected = HEADER.size + 12 * num_sequences + 8 * num_ends
    if size not in (expected, expected + num_sequences):
        raise damaged(
            index, (f"has {size} bytes, but needs {expected} for its {num_sequences} sequences")
        )
    if size > expected and (modes := np.memmap(index, "i1", "r", expected)).any():
        raise ConfigError(
            f"{index}: sequence {np.argmax(modes)} has mode {modes[np.argmax(modes)]}: it is an "
            "image or other data, not token ids. Only modes of 0 are supported."
        )
    if not num_sequences or num_ends < 2:
        raise ConfigError(f"{index}: has no documents. Leave it out.")
    lengths, pointers, documents = _arrays(index, num_sequences, num_ends)
    num_bytes = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
    if binary.stat().st_size != num_bytes:
        raise damaged(binary, f"has {binary.stat().st_size} bytes, but its index lists {num_bytes}")
    if documents[0] != 0 or documents[-1] != num_sequences:
        raise damaged(index, f"its documents do not end at sequence {num_sequences}")

    def read() -> Iterator[Items]:
        ids = np.memmap(binary, dtype, "r")
        lengths, pointers, documents = _arrays(index, num_sequences, num_ends)
        for first in range(0, num_ends - 1, BLOCK_DOCUMENTS):
            bounds = documents[first : first + BLOCK_DOCUMENTS + 1]
            start, stop = int(bounds[0]), int(bounds[-1])
            if (np.diff(bounds) < 0).any() or stop > num_sequences:
                raise damaged(index, f"documents from {first} on are not ascending")
            sizes = lengths[start:stop].astype(np.int64)
            places = np.append(pointers[start:stop], num_bytes)
            if stop < num_sequences:
                places[-1] = pointers[stop]
            if (sizes < 0).any() or (np.diff(places) != sizes * dtype.itemsize).any():
                raise damaged(index, f"sequences from {start} on are not contiguous")
            base = int(places[0]) // dtype.itemsize
            ends = places[bounds[1:] - start] // dtype.itemsize - base
            for one, two in piece_bounds(ends):
                begin = int(ends[one - 1]) if one else 0
                yield Items(ids[base + begin : base + int(ends[two - 1])], ends[one:two] - begin)

    num_ids = num_bytes // dtype.itemsize
    return InputFile(binary, "document", size + num_bytes, num_ids, read)


def _arrays(index: Path, num_sequences: int, num_ends: int) -> tuple[np.ndarray, ...]:
    place = HEADER.size
    lengths = np.memmap(index, "<i4", "r", place, (num_sequences,))
    place += lengths.nbytes
    pointers = np.memmap(index, "<i8", "r", place, (num_sequences,))
    return lengths, pointers, np.memmap(index, "<i8", "r", place + pointers.nbytes, (num_ends,))
