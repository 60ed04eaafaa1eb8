"""Tokenize in this process, and read shards without the project's reader."""

import json
from pathlib import Path

import numpy as np

from data_prep.encode.options import TokenizeOptions
from data_prep.encode.run import run_tokenization
from data_prep.read.discovery import find_inputs
from data_prep.tasks.phases import LocalExecutor
from data_prep.tokenizer.load import load_tokenizer
from tests.data_prep.small_corpus import write_jsonl
from zerolm.shards.reader import open_source


def documents_of(directory) -> list[list[int]]:
    """Read shards without this project's reader: documents as lists of ids."""
    manifest = json.loads((Path(directory) / "manifest.json").read_text())
    documents = []
    for shard in manifest["shards"]:
        ids = np.fromfile(Path(directory) / shard["file"], "<u2")
        ends = np.fromfile(Path(directory) / shard["index"], "<u8").astype(int)
        documents += [part.tolist() for part in np.split(ids, ends[:-1])]
    return documents


def files_of(directory) -> dict[str, bytes]:
    """Return {name: content} of all files; of a manifest without the command that made it."""
    files = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }
    if "manifest.json" in files:
        manifest = json.loads(files["manifest.json"])
        assert manifest.pop("command")[3] == "tokenize" and manifest.pop("digest")
        files["manifest.json"] = json.dumps(manifest).encode()
    return files


def run_here(texts, directory, tokenizer_directory, val_fraction=None):
    """Tokenize in this process; return the opened sources."""
    Path(directory).mkdir(exist_ok=True)
    outputs = [Path(directory) / name for name in ("train", "val")][
        : 1 + (val_fraction is not None)
    ]
    inputs, _ = find_inputs([str(write_jsonl(Path(directory) / "a.jsonl", texts))], "text")
    options = TokenizeOptions(encoder="tokenizers", val_fraction=val_fraction)
    tokenizer = load_tokenizer(str(tokenizer_directory))
    run_tokenization(inputs, tokenizer, outputs, options, LocalExecutor(1), {})
    return [open_source(output) for output in outputs]
