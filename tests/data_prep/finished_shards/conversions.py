"""The documents in the files of the peers, and the command that converts them."""

import base64
import json
import zlib
from pathlib import Path

from tokenizers import Tokenizer

from data_prep.__main__ import main

EOS = 0
DOCUMENTS = [[1, 2, 3, EOS], [4, EOS], [EOS], [*range(5, 300), EOS]]


def open_eos(tokenizer_directory) -> int | None:
    backend = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    return backend.token_to_id("<|endoftext|>")


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


def manifest_of(directory) -> dict:
    return json.loads((Path(directory) / "manifest.json").read_text())


def write_peer_files(directory: Path) -> Path:
    """Write the files that the peers' own libraries wrote, below a directory."""
    content = json.loads((Path(__file__).parent / "peer_files.json").read_text())
    for name, data in content["files"].items():
        (directory / name).parent.mkdir(exist_ok=True, parents=True)
        (directory / name).write_bytes(zlib.decompress(base64.b64decode(data)))
    return directory
