"""MosaicML's streaming format, MDS: shard.00000.mds with samples, index.json with columns.

    .mds   uint32 N; uint32 (N + 1,) offsets of the samples in the file; JSON of the columns; then
           each sample: uint32 size of each column without a fixed one, then the columns' bytes

A column `ndarray:uint16` consists of a byte `4 ndim + log2(bytes per dimension)`, the shape, and
the values. If the column type has no dtype, a byte with the dtype's code comes first; if it has a
fixed shape, only the values are stored. Source:
https://github.com/mosaicml/streaming/tree/main/streaming/base/format/mds
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from data_prep.finished_shards.items import (
    InputFile,
    Items,
    ReadOptions,
    damaged,
    grouped,
    listed_file,
    offsets_of,
    read_index,
    read_whole,
)
from zerolm.common.errors import ConfigError
from zerolm.common.records import Count, Name

VERSION = 2
COLUMNS = ("tokens", "input_ids", "ids")
HEADER_KEYS = ("column_names", "column_encodings", "column_sizes")
VALUE_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
INTEGERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"}


class _File(TypedDict):
    basename: Name
    bytes: Count


class _Shard(TypedDict):
    format: str
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    compression: str | None
    samples: Count
    raw_data: _File
    zip_data: _File | None


class _Index(TypedDict):
    version: int
    shards: list[_Shard]


def find(path: Path, options: ReadOptions) -> list[InputFile]:
    """Open a directory with index.json."""
    directory = path.parent if path.name == "index.json" else path
    index = read_index(directory / "index.json", _Index)
    if index["version"] != VERSION:
        raise ConfigError(
            f"{directory / 'index.json'}: version is {index['version']}, but only version "
            f"{VERSION} is known. Write it again with a current release of streaming."
        )
    return [_open(directory, shard, options) for shard in index["shards"]]


def _open(directory: Path, shard: _Shard, options: ReadOptions) -> InputFile:
    stored = shard["zip_data"] or shard["raw_data"]
    path = directory / stored["basename"]
    if shard["format"] != "mds":
        raise ConfigError(f"{path}: is {shard['format']}, not MDS.")
    names, encodings = shard["column_names"], shard["column_encodings"]
    found = [name for name in ([options.column] if options.column else COLUMNS) if name in names]
    if not found:
        raise ConfigError(
            f"{path}: has no column {options.column or ' or '.join(COLUMNS)}, but "
            f"{', '.join(names)}. Name the column that contains the ids with --column."
        )
    place = names.index(found[0])
    kind, _, rest = encodings[place].partition(":")
    dtype = options.dtype if kind == "bytes" else rest.partition(":")[0]
    if kind not in ("ndarray", "bytes") or dtype not in (INTEGERS | {""}):
        raise ConfigError(
            f"{path}: column {found[0]} is {encodings[place]}, not an ndarray of integers"
            + (
                ". Name the integer type of its bytes, such as --dtype int64 for LLM Foundry."
                if kind == "bytes"
                else ", nor bytes."
            )
        )
    listed_file(path, stored["bytes"])
    has_shape = kind == "bytes" or ":" in rest

    def read() -> Iterator[Items]:
        content = read_whole(path, shard["compression"] if shard["zip_data"] else None)
        offsets = offsets_of(path, content, shard["samples"])
        header = _header(path, content[4 * (len(offsets) + 1) : offsets[0]])
        if any(header.get(key) != shard[key] for key in HEADER_KEYS):  # type: ignore[literal-required]
            raise ConfigError(
                f"{path}: states other columns than index.json: {header}. Restore the index."
            )
        yield from grouped(_samples(path, content, offsets, shard["column_sizes"], place, dtype))

    def _samples(
        path: Path, content: np.ndarray, offsets: np.ndarray, sizes: Any, place: int, dtype: Any
    ) -> Iterator[np.ndarray]:
        dynamic = [number for number, size in enumerate(sizes) if not size]
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            start = begin + 4 * len(dynamic)
            known = list(sizes)
            for number, size in zip(dynamic, content[begin:start].view("<u4"), strict=True):
                known[number] = int(size)
            if start + sum(known) != end:
                raise damaged(path, f"the sample at byte {begin} does not have the sizes it states")
            start += sum(known[:place])
            yield _values(path, content[start : start + known[place]], dtype, has_shape)

    return InputFile(path, "sample", stored["bytes"], None, read)


def _header(path: Path, data: np.ndarray) -> dict[str, Any]:
    """Return the JSON in a shard that describes its columns."""
    try:
        return json.loads(data.tobytes())
    except ValueError as error:
        raise damaged(path, f"the description of its columns cannot be read ({error})") from None


def _values(path: Path, data: np.ndarray, dtype: str, has_shape: bool) -> np.ndarray:
    """Decode an array, and return its ids."""
    try:
        if not dtype:
            dtype, data = VALUE_DTYPES[int(data[0])], data[1:]
        if not has_shape:
            ndim, shape_bytes = int(data[0]) >> 2, 1 << (int(data[0]) & 3)
            data = data[1 + ndim * shape_bytes :]
        return np.frombuffer(data.tobytes(), np.dtype(dtype).newbyteorder("<"))
    except (KeyError, IndexError, ValueError) as error:
        raise damaged(path, f"an array cannot be decoded ({error!r})") from None
