"""Tokens per second of `TokenStream`, compared with other readers of the same token IDs.

    bash benchmarks/peers.sh .venv-peers
    .venv-peers/bin/python -m benchmarks.stream_speed --output FILE

A window has 2,049 IDs. Every reader returns each window of one epoch once, shuffled, in batches of
8 rows of int64 inputs and targets. An untimed run first checks that the windows are the same. The
readers, in benchmarks/stream_speed/readers.py:

    zerolm                    TokenStream; each block of 8 KiB is verified when it is first read
    np.memmap, nanoGPT's loop the usual loop
    np.memmap, tight          the same, optimized
    mosaicml-streaming        StreamingDataset over MDS, one window per sample, shuffled (py1e)
    litdata                   StreamingDataset with TokensLoader, shuffled

Each measurement is a new process; imports are not timed. Readers take turns (A B C, A B C, ...),
ratios are taken within a turn, and the tables have medians and quartiles. Warm: the files are read
once before. Cold: the page cache has dropped the files (posix_fadvise), which mincore confirms. The
loops over np.memmap have one file, no weights and no checks, and need a stored permutation to
resume. A peer that is not installed is left out and reported.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.machine import storage
from benchmarks.stream_speed.copies import DOCUMENT_TOKENS, EOS_ID, VOCAB_SIZE
from benchmarks.stream_speed.readers import READERS
from benchmarks.tables import parser, show, spread, table

OURS = "zerolm"
LIMIT_SECONDS = 600
HEAD = ["reader", "Mtok/s", "speed of zerolm / this reader (quartiles)", "first batch, ms"]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--readers", nargs="+", default=list(READERS), choices=list(READERS))
    flags.add_argument("--seq_len", type=int, default=2048)
    flags.add_argument("--windows", type=int, default=49_152, help="(default: 201 MB)")
    flags.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    flags.add_argument("--repeats", type=int, default=5)
    flags.add_argument("--cold_windows", type=int, default=245_760, help="for cold reads")
    flags.add_argument("--cold_batches", type=int, default=400, help="0: no cold reads")
    flags.add_argument("--cold_repeats", type=int, default=3)
    flags.add_argument("--directory", type=Path, help="directory on the disk to measure")
    options = flags.parse_args()
    machine = storage()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        work = Path(scratch)
        ids = corpus(work / "ids.bin", options.windows * options.seq_len + 1)
        ready, notes = prepare(work / "warm", ids, options.readers, options)
        report = ["\n".join(f"- {note}" for note in notes)]
        report += [warm_table(work / "warm", ids, ready, n, options) for n in options.workers]
        shutil.rmtree(work / "warm")
        if options.cold_batches:
            ids = corpus(ids, options.cold_windows * options.seq_len + 1)
            ready = prepare(work / "cold", ids, ready, options, verify=False)[0]
            report.append(cold_table(work / "cold", ids, ready, options))
    show(report, machine, options.output)


def corpus(path: Path, count: int) -> Path:
    """Write random token IDs in documents of 1,000."""
    generator = np.random.default_rng(0)
    with open(path, "wb") as file:
        for start in range(0, count, 10_000 * DOCUMENT_TOKENS):
            size = min(count - start, 10_000 * DOCUMENT_TOKENS)
            ids = generator.integers(1, VOCAB_SIZE, size, dtype=np.uint16)
            ids[DOCUMENT_TOKENS - 1 :: DOCUMENT_TOKENS] = EOS_ID
            ids[-1] = EOS_ID
            ids.tofile(file)
    return path


def prepare(
    directory: Path,
    ids: Path,
    readers: list[str],
    options: argparse.Namespace,
    verify: bool = True,
) -> tuple[list[str], list[str]]:
    """Write each reader's copy, and verify what it reads; return (usable readers, notes)."""
    ready, notes = [], []
    for name in readers:
        same = next((other for other in ready if other.split(",")[0] == name.split(",")[0]), None)
        if same:  # the same files
            (directory / name).symlink_to(directory / same)
        else:
            done = run_reader("write", name, directory / name, ids, options)
            if done.returncode:
                notes.append(f"{name}: not measured: {done.stderr.strip().splitlines()[-1]}")
                continue
        ready.append(name)
        if verify:
            result = measure(name, directory / name, ids, options, "--verify")
            notes.append(
                f"{name}: {result['rows']} rows, {result['same_windows']} of the "
                f"{result['windows']} windows, {result['twice']} rows twice."
            )
            print(notes[-1], flush=True)
    return ready, notes


def run_reader(
    action: str, name: str, directory: Path, ids: Path, options: argparse.Namespace, *more: str
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.stream_speed.readers", action, name]
    argv += [str(directory), str(ids), "--seq_len", str(options.seq_len), *more]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def measure(
    name: str, directory: Path, ids: Path, options: argparse.Namespace, *more: str
) -> dict[str, Any]:
    done = run_reader("read", name, directory, ids, options, *more)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_turn(
    repeats: int, readers: list[str], one: Callable[[str, int], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Let the readers take turns; return {reader: what each of its turns measured}."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in readers}
    for repeat in range(repeats):
        for name in readers:
            found[name].append(one(name, repeat))
        print(f"turn {repeat + 1}: done", flush=True)
    return found


def rows_of(found: dict[str, list[dict[str, Any]]], digits: int = 1) -> list[list[str]]:
    """Return the rows of a table: rate, ratio and first batch."""
    rows = []
    for name, each in found.items():
        rate = statistics.median(one["tokens_per_second"] for one in each) / 1e6
        ratios = [
            ours["tokens_per_second"] / theirs["tokens_per_second"]
            for ours, theirs in zip(found.get(OURS, []), each, strict=False)
        ]
        ratio = spread(ratios, 2) if ratios and name != OURS else "-"
        first = statistics.median(one["first_batch_seconds"] for one in each)
        rows.append([name, f"{rate:.{digits}f}", ratio, f"{first * 1e3:.1f}"])
    return rows


def warm_table(
    directory: Path, ids: Path, readers: list[str], workers: int, options: argparse.Namespace
) -> str:
    def one(name: str, repeat: int) -> dict[str, Any]:
        for path in files_of(directory / name):
            path.read_bytes()
        more = ("--workers", str(workers), "--seed", str(repeat))
        return measure(name, directory / name, ids, options, *more)

    found = in_turn(options.repeats, readers, one)
    return (
        f"Warm, {workers} workers, an epoch of {options.windows} windows, {options.repeats} "
        "turns:\n\n" + table(HEAD, rows_of(found))
    )


def cold_table(directory: Path, ids: Path, readers: list[str], options: argparse.Namespace) -> str:
    os.sync()  # the page cache cannot drop unwritten pages
    resident = [0.0]

    def one(name: str, repeat: int) -> dict[str, Any]:
        resident.extend(drop_from_page_cache(path) for path in files_of(directory / name))
        more = ("--batches", str(options.cold_batches), "--seed", str(repeat))
        return measure(name, directory / name, ids, options, *more)

    found = in_turn(options.cold_repeats, readers, one)
    size = options.cold_windows * options.seq_len * 2 / 1e9
    rows = rows_of(found, 2)
    for row in rows:
        each = found[row[0]]
        share = [one["disk_bytes"] / (one["rows"] * options.seq_len * 2) for one in each]
        row.append(f"{statistics.median(share):.1f}")
    return (
        f"{'Cold' if max(resident) < 0.05 else 'NOT COLD'}, no workers: {options.cold_batches} "
        f"batches of {size:.1f} GB, {options.cold_repeats} turns; of a file at most "
        f"{max(resident):.1%} was in memory before a measurement.\n\n"
        + table([*HEAD, "bytes read from disk / bytes of windows"], rows)
    )


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.resolve().rglob("*") if path.is_file()]


def drop_from_page_cache(path: Path) -> float:
    """Drop a file from the page cache; return the share that is still cached."""
    if not path.stat().st_size:
        return 0.0
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    content = np.memmap(path, np.uint8, mode="r")
    vector = (ctypes.c_ubyte * (-(-len(content) // os.sysconf("SC_PAGE_SIZE"))))()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(content.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(len(content)), vector) == 0
    return float((np.frombuffer(vector, np.uint8) & 1).mean())


if __name__ == "__main__":
    main()
