"""How many documents best-fit packing keeps unsplit, and the cost of building its index.

    python benchmarks/packing.py                         # real text: Python's sources and manual
    python benchmarks/packing.py --documents 10000000    # and this many synthetic documents

Real text comes with Python: the sources of its standard library without tests, and its language
reference (`pydoc_data.topics`) by topic. The tokenizer is trained on an eighth of it. Documents are
packed for several sequence lengths, and compared with windows of the concatenated text ("concat").
Lengths of synthetic documents are log-normal (median 400 tokens, sigma 1.2: a choice, not a
measurement). Each index is built in a new process, to measure its peak memory. The reference for
time is `numpy.sort` of the same number of values.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.tokenize.pack import EFFICIENCY_HEADER, Efficiency, pack
from zerolm.shards.reader import open_source
from zerolm.shards.writer import ShardWriter

VOCAB_SIZE = 16_000


def real_documents() -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "test", "tests"}
    files = [path for path in sorted(library.rglob("*.py")) if not excluded & set(path.parts)]
    texts = [topics[name] for name in sorted(topics)]
    for path in files:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:  # test files in other encodings
            continue
    return [text for text in texts if text.strip()]


def write_real(directory: Path) -> Path:
    import tokenizers

    texts = real_documents()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<eos>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(texts[::8], trainer)
    with writer(directory) as shards:
        for text in texts:
            shards.add(np.array([*model.encode(text).ids, 0]))
    print(f"{len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} M characters")
    return directory


def writer(directory: Path) -> ShardWriter:
    tokenizer = {"name": "benchmark", "fingerprint": "benchmark", "files": []}
    return ShardWriter(directory, vocab_size=VOCAB_SIZE, eos_id=0, tokenizer=tokenizer)


def synthetic(directory: Path, count: int) -> Path:
    """Write shards with a real index and sparse token files: only document ends are read."""
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.2, count).astype(np.int64) + 2
    ends = np.cumsum(lengths)
    directory.mkdir()
    shards, first, start = [], 0, 0
    while first < count:
        last = max(first + 1, int(np.searchsorted(ends, start + (1 << 27), side="right")))
        name = f"shard-{len(shards):05d}"
        tokens = int(ends[last - 1]) - start
        with open(directory / f"{name}.bin", "wb") as file:
            file.truncate(2 * tokens)
        (ends[first:last] - start).astype("<u8").tofile(directory / f"{name}.idx")
        shards.append({
            "file": f"{name}.bin", "num_tokens": tokens, "num_documents": last - first,
            "size_bytes": 2 * tokens, "sha256": name, "index": f"{name}.idx",
            "index_size_bytes": 8 * (last - first), "index_sha256": name,
        })  # fmt: skip
        first, start = last, int(ends[last - 1])
    manifest = {
        "format": "zerolm-shards", "version": 1, "dtype": "uint16", "vocab_size": VOCAB_SIZE,
        "eos_id": 0, "num_tokens": int(ends[-1]), "num_documents": count,
        "tokenizer": {"name": "none", "fingerprint": "none", "files": []}, "shards": shards,
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def table(directory: Path, seq_len: int) -> None:
    source = open_source(directory)
    start = time.perf_counter()
    manifest = pack(source, seq_len)
    seconds = time.perf_counter() - start
    numbers = np.random.default_rng(1).random(source.num_documents)
    start = time.perf_counter()
    np.sort(numbers)
    ratio = seconds / max(time.perf_counter() - start, 1e-9)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nseq_len {seq_len}: {source.num_documents:,} documents, {source.num_tokens:,} tokens")
    print(EFFICIENCY_HEADER)
    for entry in manifest["efficiency"]:
        print(Efficiency(**entry).line(source.num_documents, source.num_tokens, seq_len))
    print(
        f"index built in {seconds:.2f} s = {ratio:.1f} x numpy.sort; peak {peak:.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--documents", type=int, default=0, help="number of synthetic documents")
    parser.add_argument("--seq_len", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--only", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        table(options.only, options.seq_len[0])
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, numpy {np.__version__}, "
          f"{platform.python_version()}")  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        sources = [write_real(Path(directory) / "real")]
        if options.documents:
            sources.append(synthetic(Path(directory) / "synthetic", options.documents))
        for shards in sources:
            for seq_len in options.seq_len:
                command = [sys.executable, __file__, "--only", shards, "--seq_len", seq_len]
                subprocess.run(list(map(str, command)), check=True, timeout=1800)


if __name__ == "__main__":
    main()
