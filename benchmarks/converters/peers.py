"""The library of each format: functions that read a directory of ours, and write one of theirs."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.libraries import import_megatron, import_streaming

Documents = list[np.ndarray]


class Skipped(Exception):
    """A peer is not installed."""


class Megatron:
    """Megatron-LM's IndexedDataset and IndexedDatasetBuilder."""

    name = "megatron"

    def __init__(self, options: argparse.Namespace):
        if options.megatron is None:
            raise Skipped("no --megatron CHECKOUT")
        _, self.module, _ = import_megatron(options.megatron.resolve())

    def read(self, directory: Path) -> Documents:
        data = self.module.IndexedDataset(str(directory / "tokens"))
        ends = data.document_indices
        return [
            np.concatenate([data[number] for number in range(one, two)])
            for one, two in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]

    def write(self, directory: Path, documents: Documents, vocab_size: int) -> list[object]:
        import torch

        directory.mkdir()
        dtype = self.module.DType.optimal_dtype(vocab_size)
        builder = self.module.IndexedDatasetBuilder(str(directory / "text.bin"), dtype)
        for number, ids in enumerate(documents):  # some documents have two sequences
            lengths = [1, len(ids) - 1] if number % 3 == 0 and len(ids) > 1 else [len(ids)]
            builder.add_document(torch.from_numpy(ids.astype(np.int64)), lengths)
        builder.finalize(str(directory / "text.idx"))
        return [directory / "text", "--from", "megatron"]


class Mds:
    """mosaicml-streaming's LocalDataset and MDSWriter; documents are arrays in `tokens`."""

    name = "mds"

    def __init__(self, options: argparse.Namespace):
        try:
            self.module = import_streaming()
        except ImportError as error:
            raise Skipped(f"mosaicml-streaming is not installed ({error})") from None

    def read(self, directory: Path) -> Documents:
        data = self.module.LocalDataset(str(directory))
        return [data[number]["tokens"] for number in range(len(data))]

    def encode(self, ids: np.ndarray) -> Any:
        return ids

    def write(self, directory: Path, documents: Documents, vocab_size: int) -> list[object]:
        columns = {"tokens": f"ndarray:{documents[0].dtype.name}", "id": "int"}
        with self.module.MDSWriter(out=str(directory), columns=columns, size_limit=1 << 20) as file:
            for number, ids in enumerate(documents):
                file.write({"tokens": ids, "id": number})
        return [directory, "--from", "mds"]


class MdsBytes(Mds):
    """As LLM Foundry writes them: bytes of int64, compressed with zstd, windows of one length."""

    name = "mds, bytes, zstd, windows"

    def write(self, directory: Path, documents: Documents, vocab_size: int) -> list[object]:
        columns = {"tokens": "bytes"}
        stream = np.concatenate(documents).astype(np.int64)
        with self.module.MDSWriter(
            out=str(directory), columns=columns, compression="zstd", size_limit=1 << 20
        ) as file:
            for start in range(0, len(stream), 512):
                file.write({"tokens": stream[start : start + 512].tobytes()})
        return [directory, "--from", "mds", "--dtype", "int64", "--boundaries", "eos"]


class Litdata:
    """litdata's StreamingDataset and optimize() with TokensLoader."""

    name = "litdata"

    def __init__(self, options: argparse.Namespace):
        try:
            import litdata
        except ImportError as error:
            raise Skipped(f"litdata is not installed ({error})") from None
        self.module = litdata

    def read(self, directory: Path) -> Documents:
        """Read single ids, because blocks drop the end of a chunk; ends are those of EOS ids."""
        loader = self.module.TokensLoader(block_size=1)
        data = self.module.StreamingDataset(str(directory), item_loader=loader, shuffle=False)
        stream = np.array([int(each[0]) for each in data])
        return np.split(stream, np.flatnonzero(stream == stream[-1])[:-1] + 1)

    def write(self, directory: Path, documents: Documents, vocab_size: int) -> list[object]:
        path = directory.with_suffix(".npz")
        ends = np.cumsum([len(document) for document in documents])
        np.savez(path, ids=np.concatenate(documents), ends=ends)
        code = (  # in a process of its own, since it starts workers
            "import sys, numpy, torch, litdata\n"
            "content = numpy.load(sys.argv[1], allow_pickle=False)\n"
            "items = numpy.split(content['ids'], content['ends'][:-1])\n"
            "kind = torch.uint16 if sys.argv[3] == 'uint16' else torch.int32\n"
            "def tokens(number):\n"
            "    yield torch.from_numpy(items[number].astype(numpy.int64)).to(kind)\n"
            "if __name__ == '__main__':\n"
            "    litdata.optimize(tokens, list(range(len(items))), sys.argv[2], num_workers=1,\n"
            "        chunk_bytes='1MB', item_loader=litdata.TokensLoader(), reorder_files=False)\n"
        )
        script = directory.with_suffix(".py")
        script.write_text(code)
        subprocess.run(
            [sys.executable, script, path, directory, documents[0].dtype.name],
            check=True, timeout=600, capture_output=True,
        )  # fmt: skip
        return [directory, "--from", "litdata"]


class Parquet:
    """Hugging Face datasets: `load_dataset("parquet")` and `Dataset.to_parquet`."""

    name = "parquet"

    def __init__(self, options: argparse.Namespace):
        import datasets

        datasets.disable_progress_bars()
        self.module = datasets

    def read(self, directory: Path) -> Documents:
        files = sorted(map(str, directory.glob("*.parquet")))
        cache = str(directory.with_suffix(".cache"))
        data = self.module.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
        return [np.array(row["ids"]) for row in data]

    def write(self, directory: Path, documents: Documents, vocab_size: int) -> list[object]:
        directory.mkdir()
        data = self.module.Dataset.from_dict({"input_ids": [ids.tolist() for ids in documents]})
        data.to_parquet(str(directory / "train.parquet"))
        return [directory, "--from", "parquet"]


class NanoGpt:
    """The lines of nanoGPT that read and write its files, in train.py and prepare.py."""

    name = "nanogpt"

    def __init__(self, options: argparse.Namespace):
        pass

    def read(self, directory: Path) -> Documents:
        dtype = np.uint16 if self.is_small(directory) else np.uint32
        stream = np.memmap(directory / "train.bin", dtype=dtype, mode="r")
        return np.split(stream, np.flatnonzero(stream == stream[-1])[:-1] + 1)

    def is_small(self, directory: Path) -> bool:
        return json.loads((directory / "_provenance.json").read_text())["vocab_size"] <= 1 << 16

    def write(self, directory: Path, documents: Documents, vocab_size: int) -> list[object]:
        directory.mkdir()
        stream = np.concatenate(documents)
        mapped = np.memmap(
            directory / "train.bin", dtype=stream.dtype, mode="w+", shape=(len(stream),)
        )
        mapped[:] = stream
        mapped.flush()
        return [directory / "train.bin", "--from", "nanogpt"]


PEERS: Sequence[Callable[[argparse.Namespace], Any]] = (
    Megatron, Mds, MdsBytes, Litdata, Parquet, NanoGpt,
)  # fmt: skip
