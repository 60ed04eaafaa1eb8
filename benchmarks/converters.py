"""Read with the peers' own libraries what `zerolm data convert` wrote, and convert what they wrote.

    bash benchmarks/peers.sh .venv-peers
    .venv-peers/bin/python -m benchmarks.converters --megatron CHECKOUT --nanochat CHECKOUT

Every id of every document is compared, for a vocabulary of 2-byte ids and one of 4-byte ids. Prints
a row for each format and direction, and ends with 1 if any id differs. A peer that is not installed
is skipped, with the reason.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.stream_copies import import_megatron, import_streaming  # noqa: E402
from data_prep.__main__ import main as data_prep  # noqa: E402
from zerolm.shards.reader import open_source  # noqa: E402
from zerolm.shards.writer import ShardWriter  # noqa: E402

Documents = list[np.ndarray]
EOS = "<|endoftext|>"


class Skipped(Exception):
    """A peer is not installed."""


def convert(*words: object) -> None:
    with redirect_stdout(io.StringIO()):
        code = data_prep(["convert", *map(str, words)])
    assert code == 0, f"convert {words} ended with {code}"


def documents_of(directory: Path) -> Documents:
    source = open_source(directory)
    return [
        ids
        for shard in range(len(source.manifest["shards"]))
        for ids in np.split(source.shard(shard), source.document_ends(shard)[:-1].astype(int))
    ]


def write_tokenizer(directory: Path, vocab_size: int) -> Path:
    """Write a tokenizer of words that are numbers; its EOS is its last id."""
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(models.WordLevel({str(each): each for each in range(vocab_size - 1)}, "0"))
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    directory.mkdir(parents=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_shards(directory: Path, tokenizer: Path, vocab_size: int, count: int) -> Documents:
    """Write shards of random documents of 1 to 400 ids, and return the documents."""
    from data_prep.tokenizer.load import load_tokenizer

    generator = np.random.default_rng(vocab_size)
    loaded = load_tokenizer(str(tokenizer))
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    documents = []
    with ShardWriter(
        directory, vocab_size=vocab_size, eos_id=vocab_size - 1, tokenizer={}, shard_tokens=400_000
    ) as writer:
        for length in generator.integers(0, 400, count).tolist():
            ids = generator.integers(0, vocab_size - 1, length + 1).astype(dtype)
            ids[-1] = vocab_size - 1
            documents.append(ids)
            writer.add(ids)
        writer.tokenizer = loaded.write_copy(directory / "tokenizer")
    return documents


# -------------------------------------------------------------------------------------------------
# Peers: each has functions that read a directory of ours, and write one of theirs


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


# -------------------------------------------------------------------------------------------------
# nanochat, which reads text


def nanochat_rows(options: argparse.Namespace, directory: Path) -> list[tuple[str, str, Any]]:
    """Compare the ids of text that nanochat's reader reads from ours, and that of its own files."""
    if options.nanochat is None:
        raise Skipped("no --nanochat CHECKOUT")
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    from data_prep.tokenizer.bpe import BpeOptions, train_bpe

    lines = [line for name in sorted(topics) for line in topics[name].splitlines() if line.strip()]
    generator = np.random.default_rng(1)
    texts = [
        f"{number} é 雪 🙂 "
        + "\n".join(lines[place] for place in generator.integers(0, len(lines), 3))
        for number in range(options.documents)
    ]
    (directory / "base_data_climbmix").mkdir(parents=True)
    train_bpe(texts[:2000], BpeOptions(1000), directory / "tokenizer", progress=False)
    theirs = directory / "theirs"
    theirs.mkdir()
    half = options.documents // 2
    for number, part in enumerate((texts[:half], texts[half:])):  # as its dev/repackage_data does
        pq.write_table(
            pa.Table.from_pydict({"text": part}), theirs / f"shard_{number:05d}.parquet",
            row_group_size=1024, use_dictionary=False, compression="zstd", compression_level=3,
            write_statistics=False,
        )  # fmt: skip
    words = ["--input", theirs, "--tokenizer", directory / "tokenizer", "--workers", 1]
    with redirect_stdout(io.StringIO()):
        code = data_prep(["tokenize", *map(str, words), "--output", str(directory / "shards")])
    assert code == 0
    ours = documents_of(directory / "shards")
    backend = Tokenizer.from_file(str(directory / "tokenizer/tokenizer.json"))
    eos = open_source(directory / "shards").eos_id
    expected = [[*backend.encode(text, add_special_tokens=False).ids, eos] for text in texts]
    target = directory / "converted"
    convert(directory / "shards", "--to", "parquet", "--with_text", "--output", target)
    (directory / "base_data_climbmix").rmdir()
    target.rename(directory / "base_data_climbmix")
    os.environ["NANOCHAT_BASE_DIR"] = str(directory)
    sys.path.insert(0, str(options.nanochat.resolve()))
    from nanochat.dataset import parquets_iter_batched

    read = [text for batch in parquets_iter_batched("val") for text in batch]  # the last file
    again = [[*backend.encode(text, add_special_tokens=False).ids, eos] for text in read]
    return [
        ("nanochat, text", "it reads ours", _difference(again, ours)),
        ("nanochat, text", "we read its own", _difference(ours, expected)),
    ]


def _difference(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return "" and the counts if all ids are equal; otherwise where they first differ."""
    if len(found) != len(expected):
        return f"DIFFERENT: {len(found):,} documents, not {len(expected):,}"
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        if not np.array_equal(one, two):
            return f"DIFFERENT: document {number}"
    return f"equal: {len(found):,} documents, {sum(map(len, found)):,} ids"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=12_000)
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat")
    parser.add_argument("--scratch", type=Path, help="where to write (default: the temporary one)")
    options = parser.parse_args()
    failed = False
    print("| format | vocabulary | direction | ids | seconds |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        for vocab_size in (50_257, 100_277):
            base = Path(scratch) / str(vocab_size)
            tokenizer = write_tokenizer(base / "tokenizer", vocab_size)
            documents = write_shards(base / "shards", tokenizer, vocab_size, options.documents)
            for kind in PEERS:
                try:
                    peer = kind(options)
                except Skipped as reason:
                    print(f"| {kind.__name__.lower()} | | skipped: {reason} | | |")
                    continue
                start = time.monotonic()
                rows = []
                if "," not in peer.name:  # not another way of writing the same format
                    target = base / f"to {peer.name}"
                    convert(base / "shards", "--to", peer.name, "--output", target)
                    rows.append(("it reads ours", _difference(peer.read(target), documents)))
                words = peer.write(base / f"of {peer.name}", documents, vocab_size)
                back = base / f"from {peer.name}"
                convert(*words, "--tokenizer", tokenizer, "--output", back)
                rows.append(("we read its own", _difference(documents_of(back), documents)))
                for direction, result in rows:
                    failed |= result.startswith("DIFFERENT")
                    seconds = time.monotonic() - start
                    name, size = peer.name, f"{vocab_size:,}"
                    print(
                        f"| {name} | {size} | {direction} | {result} | {seconds:.0f} |", flush=True
                    )
        try:
            for name, direction, result in nanochat_rows(options, Path(scratch) / "nanochat"):
                failed |= result.startswith("DIFFERENT")
                print(f"| {name} | 1,000 | {direction} | {result} | |")
        except Skipped as reason:
            print(f"| nanochat | | skipped: {reason} | | |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
