"""Small shards for tests."""

import json
import os
from pathlib import Path

import numpy as np

from tests.manifests import write_shard_manifest
from zerolm.shards.writer import ShardWriter

EOS = 0
TOKENIZER = {"name": "test", "fingerprint": "f", "files": []}


def writer(directory, vocab_size=1000, **options) -> ShardWriter:
    return ShardWriter(directory, vocab_size=vocab_size, eos_id=EOS, tokenizer=TOKENIZER, **options)


def write(directory, documents=((1, 2, EOS), (3, EOS), (4, 5, 6, EOS)), **options) -> Path:
    with writer(directory, **options) as open_writer:
        for document in documents:
            open_writer.add(np.array(document))
    return Path(directory)


def without_fine(directory: Path) -> Path:
    """Remove the small checksums, as of shards of an older release."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for shard in manifest["shards"]:
        (directory / shard["fine"]).unlink()
        for key in ("fine", "fine_size_bytes", "fine_sha256"):
            del shard[key]
    write_shard_manifest(directory, manifest)
    return directory


def many_shards(directory, count, monkeypatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # takes most of the time
        return write(directory, [[number + 1, EOS] for number in range(count)], shard_tokens=2)
