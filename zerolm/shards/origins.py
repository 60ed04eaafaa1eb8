"""Where a document of a shard came from: which input file, and where in it.

`shard-00000.org` beside a shard has 8 bytes for each of its documents, little-endian: the number of
the input in `inputs.json`, shifted left by 40 bits, and the position in it. Both are optional: a
source without them has no origins.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zerolm.errors import ShardError

if TYPE_CHECKING:  # workers that tokenize import this module, and no reader of shards
    from zerolm.shards import Source

INPUTS = "inputs.json"
POSITION_BITS = 40
MAX_POSITION = 1 << POSITION_BITS  # 1 TiB of one file, decompressed
MAX_INPUTS = 1 << (64 - POSITION_BITS)


class Origin(NamedTuple):
    """A place in an input."""

    file: str  # as the tokenization was given it: a path, or the id of a data set
    position: int
    unit: str  # what the position counts, from 0: "byte" (of a decompressed file) or "row"


def pack_origins(number: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return (D,) uint64 for documents at these positions of an input."""
    return (np.asarray(number, np.uint64) << np.uint64(POSITION_BITS)) | np.asarray(
        positions, np.uint64
    )


def origin(source: Source, document: int) -> Origin | None:
    """Say where a document came from; None if the source does not tell.

    Args:
        document: counted from 0 over all shards of the source.

    Raises:
        IndexError: the source has fewer documents.
        ShardError: the files that tell are missing or cut.
    """
    if not 0 <= document < source.num_documents:
        raise IndexError(f"document {document} is outside of {source.num_documents}")
    for shard in source.manifest["shards"]:
        if document < shard["num_documents"]:
            break
        document -= shard["num_documents"]
    if "origins" not in shard or "input_files" not in source.manifest:
        return None
    path = source.directory / shard["origins"]
    listed = source.directory / source.manifest["input_files"]["file"]
    try:
        content = source.files.bytes_of(shard["origins"], 8 * document, 8 * document + 8)
        (packed,) = np.frombuffer(content, "<u8").tolist()
        inputs = json.loads(source.files.bytes_of(listed.name))["inputs"]
        entry = inputs[packed >> POSITION_BITS]
        return Origin(entry["name"], packed & (MAX_POSITION - 1), entry["unit"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ShardError(
            f"{path}: cannot tell where document {document} of {shard['file']} came from "
            f"({error}). Restore it and {listed}, or tokenize again."
        ) from error
