"""The documents in the files of the peers, and the command that converts them."""

import json
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
