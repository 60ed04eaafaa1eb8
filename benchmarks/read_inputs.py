"""CPU seconds to read and parse documents, compared with plain loops over the same libraries.

    python benchmarks/read_inputs.py [--megabytes 64]

Every reader returns the texts of the same documents, from `.jsonl`, `.jsonl.gz`, `.jsonl.zst` and
`.parquet`. The plain loops parse one line at a time with `orjson`, from `open`, `gzip.open` and
`zstandard`, and read batches of 1,024 rows with `pyarrow`. They cannot resume, have no line numbers
and no limits, and fail on damaged input. Rates are bytes of plain JSON lines per CPU second of one
process; repetitions are interleaved, and the table has medians.
"""

import argparse
import gzip
import io
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.read.discovery import find_inputs
from data_prep.read.documents import InputRules
from data_prep.read.work_units import Tally, plan_units, read_batches

REPETITIONS = 5
NAMES = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet")


def write_corpus(directory: Path, megabytes: int) -> int:
    """Write the same documents in every format; return the size of the plain one in bytes."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 9))) for _ in range(5000)]
    texts, size = [], 0
    while size < megabytes * 1_000_000:
        text = " ".join(rng.choices([*words, "žluť", '"so"'], k=rng.randrange(50, 1200))) + "\n"
        texts.append(text)
        size += len(text)
    data = "".join(
        json.dumps({"text": text, "id": n, "source": "web"}, ensure_ascii=False) + "\n"
        for n, text in enumerate(texts)
    ).encode()
    (directory / "a.jsonl").write_bytes(data)
    (directory / "a.jsonl.gz").write_bytes(gzip.compress(data, 6))
    (directory / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    table = pa.table({"text": texts, "id": list(range(len(texts)))})
    pq.write_table(table, directory / "a.parquet", compression="zstd", row_group_size=5000)
    return len(data)


def ours(path: Path) -> int:
    """Read with data_prep; return the number of characters."""
    inputs, _ = find_inputs([str(path)], "text")
    return sum(
        len(document.text)
        for unit in plan_units(inputs)
        for batch in read_batches(inputs, unit, InputRules(), Tally())
        for document in batch.documents
    )


def plain(path: Path) -> int:
    """Read with a plain loop; return the number of characters."""
    if path.suffix == ".parquet":
        batches = pq.ParquetFile(path).iter_batches(1024, columns=["text"])
        return sum(len(text) for batch in batches for text in batch.column(0).to_pylist())
    if path.suffix == ".zst":
        with path.open("rb") as raw:
            stream = zstandard.ZstdDecompressor().stream_reader(raw)
            return sum(len(orjson.loads(line)["text"]) for line in io.BufferedReader(stream))
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        return sum(len(orjson.loads(line)["text"]) for line in file)


def cpu_seconds(read: Callable[[Path], int], path: Path) -> tuple[float, int]:
    """Return (CPU seconds to read a file, its number of characters)."""
    start = time.process_time()
    characters = read(path)
    return time.process_time() - start, characters


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--megabytes", type=int, default=64)
    megabytes = arguments.parse_args().megabytes
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {sys.version}")
    print("| input | MB/s per core | plain loop | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        size = write_corpus(Path(name), megabytes)
        for file in NAMES:
            rates: tuple[list[float], list[float]] = ([], [])
            for _ in range(REPETITIONS):
                counts = set()
                for read, rates_of in zip((ours, plain), rates, strict=True):
                    seconds, characters = cpu_seconds(read, Path(name, file))
                    rates_of.append(size / 1e6 / seconds)
                    counts.add(characters)
                assert len(counts) == 1, "the readers returned different texts"
            ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
            one, other = map(statistics.median, rates)
            print(f"| `{file[1:]}` | {one:.0f} | {other:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
