"""nanoGPT's flat files: the ids of all documents one after another, without an index.

Only EOS ids mark where documents end. Files from llm.c, modded-nanogpt and NeMo AutoModel are also
supported; they begin with 256 int32 values, including the magic number, the version, the number of
ids and, for NeMo, the bytes per id. So are arrays that NumPy saved, and the sizes that datatrove
states beside its flat files. Sources:
https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py,
https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py,
https://github.com/NVIDIA-NeMo/Automodel, components/datasets/llm/nanogpt_dataset.py,
https://github.com/huggingface/datatrove, pipeline/tokens/tokenizer.py
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
# {(magic number, version): bytes per id}: of GPT-2's and Llama 3's tokenizers in llm.c, and of NeMo
# AutoModel, where 0 stands for the header's fourth value.
HEADERS = {(20240520, 1): 2, (20240801, 7): 4, (278895051, 1): 0}
OTHER_CONTENTS = {
    b"PAR1": "Parquet: give --from parquet",
    b"MMIDIDX\0": "an index of Megatron: give --from megatron",
    b"PK\x03\x04": "a ZIP archive, as numpy.savez and torch.save write: save its array with tofile",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard: decompress it",
    b"\x1f\x8b\x08\x00": "compressed with gzip: decompress it",
    b"\x1f\x8b\x08\x08": "compressed with gzip: decompress it",
    b"\xfd7zXZ\x00": "compressed with xz: decompress it",
    b"BZh91AY&SY": "compressed with bzip2: decompress it",
    b"\x89HDF\r\n": "HDF5: save its array with tofile",
    b"ARROW1\0\0": "Arrow: save its column with tofile",
}
NUMPY = b"\x93NUMPY"
DTYPES = ("uint16", "uint32", "int32", "int64")
NO_ENDS = np.empty(0, np.int64)


def find(path: Path, options: ReadOptions) -> list[InputFile]:
    """Open a .bin file, or all .bin files in a directory, sorted by name."""
    return [_open(file, options) for file in files_of(path, ".bin")]


def _open(path: Path, options: ReadOptions) -> InputFile:
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype}: is not one of {', '.join(DTYPES)}.")
    size = path.stat().st_size
    dtype, start = _layout(path, size, options.dtype or "uint16")

    def read() -> Iterator[Items]:
        ids = np.memmap(path, dtype, "r", start)
        for first in range(0, len(ids), PIECE_TOKENS):
            yield Items(ids[first : first + PIECE_TOKENS], NO_ENDS)

    num_ids = (size - start) // dtype.itemsize
    return InputFile(path, "document", size, num_ids, read, has_ends=False)


def _layout(path: Path, size: int, default: str) -> tuple[np.dtype, int]:
    """Return the dtype of a file's ids and the byte at which they start; check the file's size.

    Args:
        default: the dtype if the file does not state one.
    """
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    for magic, content in OTHER_CONTENTS.items():
        if head.startswith(magic):
            raise ConfigError(f"{path}: contains no flat ids, but is {content}.")
    if head.startswith(NUMPY):
        return _numpy_layout(path)
    words = np.frombuffer(head[: len(head) // 4 * 4], "<i4").tolist()
    width = HEADERS.get(tuple(words[:2]), -1)
    if width == 0:
        width = words[3] if len(words) > 3 else 0
    if width in (2, 4):
        if size - HEADER_BYTES != words[2] * width:
            raise damaged(path, f"has {size} bytes, but its header states {words[2]} ids")
        return np.dtype(f"<u{width}"), HEADER_BYTES
    is_sized = len(words) == 256 and size - HEADER_BYTES in [
        words[2] * each for each in (1, 2, 4, 8)
    ]
    if width != -1 or is_sized or (len(words) == 256 and not any(words[8:])):
        raise ConfigError(
            f"{path}: begins with a header like that of llm.c, with the numbers {words[:4]}, but "
            f"only magic numbers and versions {', '.join(map(str, HEADERS))} are known, with 2 or "
            "4 bytes per id. Write the ids without a header."
        )
    dtype = np.dtype(default).newbyteorder("<")
    metadata = path.with_name(f"{path.name}.metadata")
    if metadata.is_file():
        line, *_ = metadata.read_text(encoding="utf-8").split("\n")
        stated = line.rpartition("|")[2]
        if stated not in ("2", "4"):
            raise ConfigError(f"{metadata}: does not end its first line with 2 or 4 bytes per id.")
        dtype = np.dtype(f"<u{stated}")
    if not size or size % dtype.itemsize:
        raise damaged(
            path, f"has {size} bytes, which is not a multiple of {dtype.itemsize} bytes per id"
        )
    return dtype, 0


def _numpy_layout(path: Path) -> tuple[np.dtype, int]:
    try:
        array = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise damaged(path, f"cannot be read as an array of NumPy ({error})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: is an array of {array.dtype} with shape {array.shape}, not a row of integers."
        )
    return array.dtype, array.offset
