"""nanoGPT's flat files: the ids of all documents one after another, without an index.

Only EOS ids mark where documents end. Files from llm.c and modded-nanogpt are also supported; they
begin with 256 int32 values, including the magic number, the version, and the number of ids.
Sources: https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py,
https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.finished_shards.documents import PIECE_TOKENS
from data_prep.finished_shards.items import (
    InputFile,
    Items,
    ReadOptions,
    damaged,
    files_of,
)
from zerolm.common.errors import ConfigError

HEADER_BYTES = 1024
HEADER_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # GPT-2's and Llama 3's tokenizers
DTYPES = ("uint16", "uint32", "int32", "int64")
NO_ENDS = np.empty(0, np.int64)


def find(path: Path, options: ReadOptions) -> list[InputFile]:
    """Open a .bin file, or all .bin files in a directory, sorted by name."""
    return [_open(file, options) for file in files_of(path, ".bin")]


def _open(path: Path, options: ReadOptions) -> InputFile:
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype}: is not one of {', '.join(DTYPES)}.")
    size = path.stat().st_size
    dtype, start = np.dtype(options.dtype or "uint16").newbyteorder("<"), 0
    head = np.fromfile(path, "<i4", 3).tolist()
    if len(head) == 3 and (head[0], head[1]) in HEADER_DTYPES:
        dtype, start = np.dtype(HEADER_DTYPES[head[0], head[1]]), HEADER_BYTES
        if size - start != head[2] * dtype.itemsize:
            raise damaged(path, f"has {size} bytes, but its header states {head[2]} ids")
    elif not size or size % dtype.itemsize:
        raise damaged(
            path, (f"has {size} bytes, which is not a multiple of {dtype.itemsize} bytes per id")
        )

    def read() -> Iterator[Items]:
        ids = np.memmap(path, dtype, "r", start)
        for first in range(0, len(ids), PIECE_TOKENS):
            yield Items(ids[first : first + PIECE_TOKENS], NO_ENDS)

    num_ids = (size - start) // dtype.itemsize
    return InputFile(path, "document", size, num_ids, read, has_ends=False)
