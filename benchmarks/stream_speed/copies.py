"""Write the same token IDs in the format of each reader in benchmarks/stream_speed/readers.py."""

import argparse
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

EOS_ID, VOCAB_SIZE, DOCUMENT_TOKENS = 0, 50_000, 1000


def write(reader: str, directory: Path, ids: np.ndarray, options: argparse.Namespace) -> None:
    """Write token IDs, (N,) uint16, in the format of a reader."""
    if reader == "zerolm":
        shards(directory, ids, options.seq_len)
    elif reader.startswith("np.memmap"):
        directory.mkdir(parents=True)
        ids.tofile(directory / "ids.bin")
    else:
        {"mosaicml-streaming": write_mds, "litdata": write_litdata}[reader](
            directory, ids, options.seq_len
        )


def import_streaming() -> Any:
    """Import mosaicml-streaming without its image data sets, which need torchvision."""
    for name in ("streaming.vision", "streaming.multimodal"):
        sys.modules[name] = types.ModuleType(name)
    import streaming

    return streaming


def shards(directory: Path, ids: np.ndarray, seq_len: int) -> None:
    from zerolm.shards.writer import ShardWriter

    tokenizer = {"name": "none", "fingerprint": "none", "files": []}
    with ShardWriter(
        directory, vocab_size=VOCAB_SIZE, eos_id=EOS_ID, tokenizer=tokenizer
    ) as writer:
        for start in range(0, len(ids), 1000 * DOCUMENT_TOKENS):
            part = ids[start : start + 1000 * DOCUMENT_TOKENS]
            ends = np.arange(DOCUMENT_TOKENS, len(part) + DOCUMENT_TOKENS, DOCUMENT_TOKENS)
            writer.add(part, np.minimum(ends, len(part)))


def write_mds(directory: Path, ids: np.ndarray, seq_len: int) -> None:
    columns = {"tokens": f"ndarray:uint16:{seq_len + 1}"}
    with import_streaming().MDSWriter(out=str(directory), columns=columns) as writer:
        for window in windows(ids, seq_len):
            writer.write({"tokens": np.ascontiguousarray(window)})


def write_litdata(directory: Path, ids: np.ndarray, seq_len: int) -> None:
    from litdata.streaming import Cache
    from litdata.streaming.item_loader import TokensLoader

    loader = TokensLoader(seq_len + 1)
    cache = Cache(str(directory), chunk_size=(seq_len + 1) * 8192, item_loader=loader)
    number = 0
    for number, window in enumerate(windows(ids, seq_len)):
        cache[number] = torch.from_numpy(np.ascontiguousarray(window))
    cache.done()
    cache.merge()


def windows(ids: np.ndarray, seq_len: int) -> Iterator[np.ndarray]:
    for start in range(0, len(ids) - seq_len, seq_len):
        yield ids[start : start + seq_len + 1]
