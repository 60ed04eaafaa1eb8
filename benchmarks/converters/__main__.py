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
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from benchmarks.converters.peers import PEERS, Documents, Skipped
from data_prep.__main__ import main as data_prep
from zerolm.shards.reader import open_source
from zerolm.shards.writer import ShardWriter

EOS = "<|endoftext|>"


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.converters", description=__doc__.partition("\n")[0]
    )
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
