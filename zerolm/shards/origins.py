"""The origin of each document in a shard: an input file, and a position in this file.

`shard-00000.org` holds 8 bytes per document, little-endian: the number of the input in
`inputs.json`, shifted left by 40 bits, plus the position in that input. Both files are optional.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zerolm.common.errors import ShardError
from zerolm.shards.table import all_have, column

if TYPE_CHECKING:  # tokenization workers, which import this module, must not load the reader
    from zerolm.shards.reader import Source

INPUTS = "inputs.json"
ORIGINS_SUFFIX = ".org"
POSITION_BITS = 40
MAX_POSITION = 1 << POSITION_BITS  # 1 TiB per file, decompressed
MAX_INPUTS = 1 << (64 - POSITION_BITS)


class Origin(NamedTuple):
    """A position in an input of the tokenization."""

    file: str  # as given to the tokenizer command: a path or a dataset id
    position: int  # counted from 0 in `unit`s
    unit: str  # "byte" (in the decompressed file) or "row"


def pack_origins(number: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Pack the origins of documents at these positions in input number `number`: (D,) uint64."""
    return (np.asarray(number, np.uint64) << np.uint64(POSITION_BITS)) | np.asarray(
        positions, np.uint64
    )


def find_origin(source: Source, document: int) -> Origin | None:
    """Return the origin of a document, or None if the source does not record it.

    Args:
        document: index of the document, counted over all shards of the source.

    Raises:
        IndexError: the source has fewer documents.
    """
    if not 0 <= document < source.num_documents:
        raise IndexError(f"document {document} is out of range: there are {source.num_documents}")
    ends = np.cumsum(column(source.shards, "num_documents"))
    number = int(np.searchsorted(ends, document, side="right"))
    shard = source.shards[number]
    document -= int(ends[number]) - shard["num_documents"]
    if "origins" not in shard or "input_files" not in source.head:
        return None
    path = source.directory / shard["origins"]
    listed = source.directory / source.head["input_files"]["file"]
    try:
        packed = int(_origins(source.files, number)[document])
        entry = _inputs(source.files)[packed >> POSITION_BITS]
        return Origin(entry["name"], packed & (MAX_POSITION - 1), entry["unit"])
    except (ValueError, LookupError, TypeError) as error:
        raise ShardError(
            f"{path}: cannot read the origin of document {document} of {shard['file']} "
            f"({error}). Restore it and {listed}, or tokenize again."
        ) from error


@lru_cache(maxsize=1)
def _origins(files: Any, number: int) -> np.ndarray:
    """Return the packed origins of a shard's documents, verified: (D,) uint64."""
    return np.frombuffer(files.read_sidecar(number, "origins"), "<u8")


@lru_cache(maxsize=1)
def _inputs(files: Any) -> list[dict[str, Any]]:
    """Return the inputs of the tokenization from the verified `inputs.json`."""
    entry = files.head["input_files"]
    return json.loads(files.read_file(entry["file"], entry["sha256"]))["inputs"]


def list_inputs(source: Source) -> list[dict[str, Any]] | None:
    """Return the inputs that a source's origins refer to; None if the source records no origins."""
    if not all_have(source.shards, "origins") or "input_files" not in source.head:
        return None
    return _inputs(source.files)
