"""litdata's token chunks, as read by its `TokensLoader`: chunk-0-0.bin and index.json.

    .bin   uint32 N; uint32 (N + 1,) offsets of the items in the file; then the ids of all items

`TokensLoader` cuts a chunk's ids into blocks and ignores item boundaries; here, each item is a
document. Source: https://github.com/Lightning-AI/litData, streaming/writer.py and
streaming/item_loader.py
"""

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

# Integer dtypes by their numbers in litdata's tables of torch and numpy dtypes.
TORCH_DTYPES = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8",
                18: "<i8", 20: "<u2"}  # fmt: skip
NUMPY_DTYPES = dict(enumerate(["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8"]))


class _Chunk(TypedDict):
    filename: Name
    chunk_bytes: Count
    chunk_size: Count
    dim: int | None


class _Always(TypedDict):
    compression: str | None
    data_format: list[str] | None


class _Config(_Always, total=False):
    encryption: dict[str, Any] | None
    item_loader: str | None


class _Index(TypedDict):
    chunks: list[_Chunk]
    config: _Config


def find(path: Path, options: ReadOptions) -> list[InputFile]:
    """Open a directory with index.json."""
    directory = path.parent if path.name == "index.json" else path
    index = read_index(directory / "index.json", _Index)
    config = index["config"]
    formats = config["data_format"] or []
    dtype = _dtype(formats[0]) if len(formats) == 1 else None
    if dtype is None or config.get("encryption"):
        raise ConfigError(
            f"{directory / 'index.json'}: data_format is {formats}; supported are unencrypted "
            f"chunks of integer tokens, no_header_tensor or no_header_numpy, as written by "
            f"optimize(..., item_loader=TokensLoader())."
        )
    if any(chunk["dim"] is None for chunk in index["chunks"]):
        raise ConfigError(
            f"{directory / 'index.json'}: chunks[].dim is null and item_loader is "
            f"{config.get('item_loader')}: chunks contain items, not tokens. Write it again with "
            "optimize(..., item_loader=TokensLoader())."
        )
    return [_open(directory, chunk, dtype, config["compression"]) for chunk in index["chunks"]]


def _dtype(data_format: str) -> str | None:
    kind, _, code = data_format.partition(":")
    if not code.isdigit():
        return None
    if kind == "no_header_tensor":
        return TORCH_DTYPES.get(int(code))
    return NUMPY_DTYPES.get(int(code)) if kind == "no_header_numpy" else None


def _open(directory: Path, chunk: _Chunk, dtype: str, compression: Any) -> InputFile:
    size = chunk["chunk_bytes"] if compression is None else None
    path = listed_file(directory / chunk["filename"], size)

    def read() -> Iterator[Items]:
        content = read_whole(path, compression)
        offsets = offsets_of(path, content, chunk["chunk_size"])
        width = np.dtype(dtype).itemsize
        if (np.diff(offsets) % width).any() or (offsets[-1] - offsets[0]) // width != chunk["dim"]:
            raise damaged(path, f"does not contain {chunk['dim']} ids of {width} bytes")
        ids = content[offsets[0] :].view(dtype)
        ends = (offsets - offsets[0]) // width
        yield from grouped(
            ids[start:end] for start, end in zip(ends.tolist(), ends[1:].tolist(), strict=False)
        )

    return InputFile(path, "document", path.stat().st_size, chunk["dim"], read)
