"""The documents in the files of the peers, and the command that converts them."""

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.__main__ import main

EOS = 0
DOCUMENTS = [[1, 2, 3, EOS], [4, EOS], [EOS], [*range(5, 300), EOS]]


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


def manifest_of(directory) -> dict:
    return json.loads((Path(directory) / "manifest.json").read_text())


def write_megatron(prefix: Path, documents: Sequence[Sequence[int]]) -> Path:
    """Write documents of uint16 as Megatron-LM does, a sequence each."""
    lengths = np.array([len(document) for document in documents])
    np.concatenate(documents).astype("<u2").tofile(prefix.with_suffix(".bin"))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    places = (2 * (np.cumsum(lengths) - lengths)).astype("<i8")
    numbers = np.arange(len(lengths) + 1, dtype="<i8")
    content = header + lengths.astype("<i4").tobytes() + places.tobytes() + numbers.tobytes()
    prefix.with_suffix(".idx").write_bytes(content)
    return prefix


def write_peer_files(directory: Path) -> Path:
    """Write the files that the peers' own libraries wrote, below a directory."""
    content = json.loads((Path(__file__).parent / "peer_files.json").read_text())
    for name, data in content["files"].items():
        (directory / name).parent.mkdir(exist_ok=True, parents=True)
        (directory / name).write_bytes(zlib.decompress(base64.b64decode(data)))
    return directory
