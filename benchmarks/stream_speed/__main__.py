"""Tokens per second of `TokenStream`, compared with other readers of the same token IDs.

    bash benchmarks/peers.sh .venv-peers
    .venv-peers/bin/python -m benchmarks.stream_speed --megatron CHECKOUT --output FILE

A window has 2,049 IDs. Every reader returns each window of one epoch once, shuffled, in batches of
8 rows of int64 inputs and targets. An untimed run first checks that the windows are the same. The
readers, in benchmarks/stream_speed/readers.py:

    zerolm                    TokenStream; each block of 8 KiB is verified when it is first read
    zerolm, blocks of 64 KiB  the same shards without the small checksums, as older releases have
                              written them
    zerolm, blocks unchecked  the same shards without checksums
    np.memmap, nanoGPT's loop the usual loop
    np.memmap, tight          the same, optimized
    mosaicml-streaming        StreamingDataset over MDS, one window per sample, shuffled (py1e)
    litdata                   StreamingDataset with TokensLoader, shuffled
    megatron                  GPTDataset over documents of 1,000 IDs. It shuffles documents before
                              it splits them, so windows differ; with `one document` they do not

Each measurement is a new process; imports are not timed. Readers take turns (A B C, A B C, ...),
ratios are taken within a turn, and the tables have medians and quartiles. Warm: the files are read
once before. Cold: the page cache has dropped the files (posix_fadvise), which mincore confirms. The
loops over np.memmap have one file, no weights and no checks, and need a stored permutation to
resume. A peer that is not installed is left out and reported.
"""

import argparse
import ctypes
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.machine import storage
from benchmarks.stream_speed.copies import DOCUMENT_TOKENS, EOS_ID, VOCAB_SIZE
from benchmarks.stream_speed.readers import READERS

OURS = "zerolm"
LIMIT_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stream_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--readers", nargs="+", default=list(READERS), choices=list(READERS))
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument(
        "--windows", type=int, default=49_152, help="windows of the corpus (default: 201 MB)"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cold_windows", type=int, default=245_760, help="windows of the corpus for cold reads"
    )
    parser.add_argument(
        "--cold_batches", type=int, default=400, help="batches of a cold read; 0: no cold reads"
    )
    parser.add_argument("--cold_repeats", type=int, default=3)
    parser.add_argument("--megatron", type=Path, help="checkout with compiled helpers")
    parser.add_argument("--directory", type=Path, help="directory on the disk to measure")
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    header = [f"{datetime.date.today()}; {storage()}", f"`{' '.join(sys.orig_argv[1:])}`"]
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        work = Path(scratch)
        ids = corpus(work / "ids.bin", options.windows * options.seq_len + 1)
        ready, notes = prepare(work / "warm", ids, options.readers, options)
        report = [*header, *notes, *warm_tables(work / "warm", ids, ready, options)]
        shutil.rmtree(work / "warm")
        if options.cold_batches:
            ids = corpus(ids, options.cold_windows * options.seq_len + 1)
            ready = [name for name in ready if name != "megatron, one document"]
            ready = prepare(work / "cold", ids, ready, options, verify=False)[0]
            report.append(cold_table(work / "cold", ids, ready, options))
    if options.output:
        options.output.write_text("\n\n".join(report) + "\n")
    print("\n\n".join(report))


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
    """Write the copy of each reader, and verify what it reads; return (usable readers, notes)."""
    ready, notes = [], []
    for name in readers:
        if name.startswith("megatron") and not options.megatron:
            notes.append(f"{name}: not measured, --megatron was not given.")
            continue
        same = next((other for other in ready if other.split(",")[0] == name.split(",")[0]), None)
        if same and "one" not in name:  # the same files
            (directory / name).symlink_to(directory / same)
        elif error := failure("write", name, directory / name, ids, options):
            notes.append(f"{name}: not measured: {error}")
            continue
        ready.append(name)
        if verify:
            result = measure(name, directory / name, ids, options, "--verify")
            notes.append(
                f"{name}: {result['rows']} rows, {result['same_windows']} of the "
                f"{result['windows']} windows, {result['twice']} rows twice."
            )
            print(notes[-1], flush=True)
    return ready, ["\n".join(f"- {note}" for note in notes)]


def command(
    action: str, name: str, directory: Path, ids: Path, options: argparse.Namespace, *more: str
) -> list[str]:
    checkout = ("--megatron", str(options.megatron.resolve())) if options.megatron else ()
    return [
        *(sys.executable, "-W", "ignore", "-m", "benchmarks.stream_speed.readers", action, name),
        *(str(directory), str(ids), "--seq_len", str(options.seq_len), *checkout, *more),
    ]


def failure(*arguments: Any) -> str | None:
    """Run a command; return the last line of its error if it fails, else None."""
    done = subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def measure(
    name: str, directory: Path, ids: Path, options: argparse.Namespace, *more: str
) -> dict[str, Any]:
    done = subprocess.run(
        command("read", name, directory, ids, options, *more),
        cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        timeout=LIMIT_SECONDS,
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


def warm_tables(
    directory: Path, ids: Path, readers: list[str], options: argparse.Namespace
) -> list[str]:
    tables = []
    for workers in options.workers:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in readers}
        for repeat in range(options.repeats):
            for name in readers:
                for path in files_of(directory / name):
                    path.read_bytes()
                more = ("--workers", str(workers), "--seed", str(repeat))
                found[name].append(measure(name, directory / name, ids, options, *more))
            print(f"{workers} workers, turn {repeat + 1}: done", flush=True)
        lines = [
            f"Warm, {workers} workers, an epoch of {options.windows} windows, {options.repeats} "
            f"turns:",
            "",
            "| reader | Mtok/s | speed of zerolm / this reader (quartiles) | first batch, ms | "
            "memory, MB |",
            "|---|---|---|---|---|",
        ]
        for name, each in found.items():
            rates = [one["tokens_per_second"] for one in each]
            first = statistics.median(one["first_batch_seconds"] for one in each)
            memory = statistics.median(one["own_bytes"] for one in each)
            lines.append(
                f"| {name} | {statistics.median(rates) / 1e6:.1f} | "
                f"{ratio(found, name)} | {first * 1e3:.1f} | {memory / 1e6:.1f} |"
            )
        tables.append("\n".join(lines))
    return tables


def ratio(found: dict[str, list[dict[str, Any]]], name: str) -> str:
    """Return the ratio of our speed to that of a reader, taken within each turn."""
    ratios = [
        ours["tokens_per_second"] / theirs["tokens_per_second"]
        for ours, theirs in zip(found.get(OURS, []), found[name], strict=False)
    ]
    if name == OURS or not ratios:
        return "-"
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def cold_table(directory: Path, ids: Path, readers: list[str], options: argparse.Namespace) -> str:
    os.sync()  # the page cache cannot drop unwritten pages
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in readers}
    resident = [0.0]
    for repeat in range(options.cold_repeats):
        for name in readers:
            resident += [drop_from_page_cache(path) for path in files_of(directory / name)]
            more = ("--batches", str(options.cold_batches), "--seed", str(repeat))
            found[name].append(measure(name, directory / name, ids, options, *more))
        print(f"cold, turn {repeat + 1}: done", flush=True)
    size = options.cold_windows * options.seq_len * 2 / 1e9
    lines = [
        f"{'Cold' if max(resident) < 0.05 else 'NOT COLD'}, no workers: {options.cold_batches} "
        f"batches of {size:.1f} GB, {options.cold_repeats} turns; of a file at most "
        f"{max(resident):.1%} was in memory before a measurement.",
        "",
        "| reader | Mtok/s | speed of zerolm / this reader (quartiles) | first batch, ms | "
        "bytes read from disk / bytes of windows |",
        "|---|---|---|---|---|",
    ]
    for name, each in found.items():
        rates = [one["tokens_per_second"] for one in each]
        first = statistics.median(one["first_batch_seconds"] for one in each)
        read = statistics.median(
            one["disk_bytes"] / (one["rows"] * options.seq_len * 2) for one in each
        )
        lines.append(
            f"| {name} | {statistics.median(rates) / 1e6:.2f} | {ratio(found, name)} | "
            f"{first * 1e3:.1f} | {read:.1f} |"
        )
    return "\n".join(lines)


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.resolve().rglob("*") if path.is_file()]


def drop_from_page_cache(path: Path) -> float:
    """Drop a file from the page cache; return the share of it that is still there."""
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
