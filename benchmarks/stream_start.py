"""Seconds to the first batch and to go on, by the size of the data; and cold reads.

    python benchmarks/stream_start.py

Start and resume: token shards of 1 M, 1 B and (simulated) 10 T ids are opened as a run opens them,
and the first batch is read, from position 0 and from nine tenths of an epoch on. The files are
holes, which have no content to wait for: what is measured is what a run computes before its first
batch, which may not grow with the data. (There are no sums: 10 T zeros would have to be hashed.)
Bare np.memmap with a stored permutation, the usual way to shuffle, is beside it as far as it fits
the memory.

Cold: batches of random windows of a file of real bytes that the page cache has let go of
(posix_fadvise DONTNEED before each repetition), by TokenStream with each block checked, without
sums, and by bare np.memmap. The share of pages that stayed in memory (mincore) is printed.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from stream_speed import BareReader, write_source  # noqa: E402 - this file is run as a script

from zerolm.data import TokenStream  # noqa: E402
from zerolm.schedule import BatchSchedule  # noqa: E402
from zerolm.shards import Source, open_source  # noqa: E402

SHARD_TOKENS = 1 << 38  # of the largest data: as few files as file systems allow
MOST_PERMUTED = 1 << 28  # windows whose permutation is made at all


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e6, 1e9, 1e13])
    parser.add_argument("--batch_rows", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--megabytes", type=int, default=400, help="of the file that is read cold")
    parser.add_argument("--cold_batches", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--output", type=Path, help="also write the tables here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        report = "\n\n".join(
            [
                f"batch {arguments.batch_rows} x {arguments.seq_len}, median of "
                f"{arguments.repeats}; Python {platform.python_version()}, torch "
                f"{torch.__version__}, numpy {np.__version__}, {os.cpu_count()} cores",
                start_table(Path(scratch), arguments),
                cold_table(Path(scratch), arguments),
            ]
        )
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print(f"\n{report}")


# ---- Start and resume


def start_table(scratch: Path, arguments: argparse.Namespace) -> str:
    lines = [
        "| tokens | shards | first batch, ms | first batch at 0.9 of an epoch, ms | "
        "stored permutation + np.memmap, ms |",
        "|---|---|---|---|---|",
    ]
    for count in map(int, arguments.tokens):
        directory = hollow_shards(scratch / f"hollow-{count}", count)
        windows = (count - 1) // arguments.seq_len
        late = windows * 9 // 10 // arguments.batch_rows * arguments.batch_rows
        times: dict[int, list[float]] = {0: [], late: []}
        for _ in range(arguments.repeats):
            for position, found in times.items():
                found.append(seconds(partial(first_batch, directory, position, arguments)))
        bare = "does not fit"
        if windows <= MOST_PERMUTED:
            took = [
                seconds(partial(permuted_batch, directory, windows, arguments))
                for _ in range(arguments.repeats)
            ]
            bare = f"{statistics.median(took) * 1e3:.2f}"
        shards = len(json.loads((directory / "manifest.json").read_text())["shards"])
        lines.append(
            f"| {count:.0e} | {shards} | {statistics.median(times[0]) * 1e3:.2f} | "
            f"{statistics.median(times[late]) * 1e3:.2f} | {bare} |"
        )
        print(f"{count:.0e} tokens: done", flush=True)
    return "\n".join(lines)


def hollow_shards(directory: Path, num_tokens: int) -> Path:
    """Write a shard directory whose token files are holes of the right size."""
    directory.mkdir()
    shards = []
    for number, start in enumerate(range(0, num_tokens, SHARD_TOKENS)):
        tokens = min(SHARD_TOKENS, num_tokens - start)
        name = f"shard-{number:05d}"
        with open(directory / f"{name}.bin", "wb") as file:
            file.truncate(2 * tokens)
        np.array([tokens], "<u8").tofile(directory / f"{name}.idx")
        shard = {"file": f"{name}.bin", "num_tokens": tokens, "num_documents": 1}
        shard |= {"size_bytes": 2 * tokens, "sha256": f"{number}", "index": f"{name}.idx"}
        shards.append({**shard, "index_size_bytes": 8, "index_sha256": "none"})
    manifest = {
        "format": "zerolm-shards", "version": 1, "dtype": "uint16", "vocab_size": 50_000,
        "eos_id": 0, "num_tokens": num_tokens, "num_documents": len(shards),
        "tokenizer": {"name": "none", "fingerprint": "none", "files": []}, "shards": shards,
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def first_batch(directory: Path, position: int, arguments: argparse.Namespace) -> None:
    next(iter(stream_of(open_source(directory), position, position + (1 << 40), arguments, 0)))


def permuted_batch(directory: Path, windows: int, arguments: argparse.Namespace) -> None:
    tokens = np.memmap(directory / "shard-00000.bin", np.uint16, mode="r")
    order = np.random.default_rng(0).permutation(windows)
    rows = [
        tokens[row * arguments.seq_len : (row + 1) * arguments.seq_len + 1].astype(np.int64)
        for row in order[: arguments.batch_rows].tolist()
    ]
    torch.from_numpy(np.stack(rows))


# ---- Cold reads


def cold_table(scratch: Path, arguments: argparse.Namespace) -> str:
    checked = write_source(scratch / "real", arguments.megabytes)
    path = checked.directory / checked.manifest["shards"][0]["file"]
    os.sync()  # what is not written yet cannot be let go of
    rows = arguments.cold_batches * arguments.batch_rows
    readers: dict[str, Callable[[int], object]] = {
        "TokenStream, each block checked": lambda seed: stream_of(
            open_source(checked.directory), 0, rows, arguments, seed
        ),
        "TokenStream without sums": lambda seed: stream_of(
            without_sums(checked), 0, rows, arguments, seed
        ),
        "bare np.memmap": lambda seed: BareReader(
            path, rows, arguments.seq_len, arguments.batch_rows, seed
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    resident: list[float] = []
    for seed in range(arguments.repeats):
        for name, make in readers.items():
            resident.append(let_go(path))
            batches = make(seed)
            took = seconds(lambda these=batches: sum(1 for _ in these))
            rates[name].append(rows * arguments.seq_len / took)
    first = rates["bare np.memmap"]
    lines = [
        f"{'Cold' if max(resident) < 0.05 else 'NOT COLD'}: {arguments.megabytes} MB, "
        f"{arguments.cold_batches} batches; "
        f"{max(resident):.1%} of it was in memory at most when a repetition began.",
        "",
        "| reader | Mtok/s | against bare np.memmap |",
        "|---|---|---|",
    ]
    for name, found in rates.items():
        ratios = [mine / bare for mine, bare in zip(found, first, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(found) / 1e6:.1f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    return "\n".join(lines)


def let_go(path: Path) -> float:
    """Have the page cache forget a file, and return the share of it that stays."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tokens = np.memmap(path, np.uint8, mode="r")
    vector = (ctypes.c_ubyte * (-(-len(tokens) // 4096)))()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(tokens.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(len(tokens)), vector) == 0
    return float((np.frombuffer(vector, np.uint8) & 1).mean())


def without_sums(source: Source) -> Source:
    """Return the same source as an older release would have written it."""
    plain = open_source(source.directory)
    for shard in plain.manifest["shards"]:
        shard.pop("sums", None)
    return plain


def stream_of(
    source: Source, position: int, end: int, arguments: argparse.Namespace, seed: int
) -> TokenStream:
    return TokenStream(
        [source],
        [1.0],
        seq_len=arguments.seq_len,
        seed=seed,
        batch_schedule=BatchSchedule(arguments.batch_rows),
        micro_batch_size=arguments.batch_rows,
        rank=0,
        world_size=1,
        position=position,
        end_position=end,
    )


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
