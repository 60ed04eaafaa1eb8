"""Seconds to the first batch, at the start and late in an epoch, by the size of the data.

    python -m benchmarks.stream_start [--output FILE]
    python -m benchmarks.stream_start --one DIRECTORY   # one start, for strace -c -f

Token shards of 1 M, 1 B and (simulated) 10 T IDs are opened as by a run: check the manifest or map
the table, compare the sizes of files, compute the fingerprint, read the first batch and verify the
checksums of its blocks, from sequence 0 and from nine tenths of an epoch. 10 T IDs are measured in
shards of 16 GiB, and in shards of the default size of `data_prep tokenize`, with and without
`shards.table`. The second table has the time of each part, the third one start in a new process:
the first rank of a node, and another. `--one` writes 10 T IDs to a directory unless it exists, and
starts once as the rank in LOCAL_RANK.

The token files are sparse files of the right size. This measures the computations and lookups
before the first batch, with the directory's entries in memory, and not the speed of a disk (cold
reads are in benchmarks/stream_speed). Each repetition has another seed, and so other windows.
The reference is np.memmap with a stored permutation, the usual way to shuffle, as far as it fits in
memory.
"""

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from benchmarks import ROOT
from benchmarks.machine import storage
from zerolm.data.loader import TokenStream
from zerolm.optim.schedule import BatchSchedule
from zerolm.shards.checksums import BLOCK_BYTES
from zerolm.shards.local import LocalFiles
from zerolm.shards.reader import open_source
from zerolm.shards.table import TABLE, write_table
from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

LARGE_SHARD_TOKENS = 1 << 33
CASES = (
    (10**6, DEFAULT_SHARD_TOKENS, False),
    (10**9, DEFAULT_SHARD_TOKENS, False),
    (10**13, LARGE_SHARD_TOKENS, True),
    (10**13, DEFAULT_SHARD_TOKENS, False),
    (10**13, DEFAULT_SHARD_TOKENS, True),
)
Case = tuple[int, int, bool]  # tokens, tokens of a shard, whether there is a table
SUFFIXES = {"index": "idx", "sums": "sums"}
MAX_PERMUTED = 1 << 28  # windows, for a stored permutation
LIMIT_SECONDS = 600
MAX_LINKS = 10_000  # hard links to one file, which file systems limit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch_rows", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="directory on the disk to measure")
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--one", type=Path, help="start once on this directory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        if not options.one.exists():
            write_table(sparse_shards(options.one, *CASES[-1][:2]))
        return print(json.dumps(one_start(options.one, options)))
    header = [f"{datetime.date.today()}; {storage()}", f"`{' '.join(sys.orig_argv[1:])}`"]
    found: dict[Case, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        for sizes in {case[:2] for case in CASES}:
            sparse_shards(directory_of(Path(scratch), *sizes), *sizes)
        for repeat in range(options.repeats):
            for case in CASES:
                directory = directory_of(Path(scratch), *case[:2])
                (directory / TABLE).unlink(missing_ok=True)
                if case[2]:
                    write_table(directory)
                each = found.setdefault(case, {})
                seconds = measured(directory, case[0], options, repeat)
                for rank in (0, 1):
                    for name, value in in_new_process(directory, rank, options).items():
                        seconds[f"{name} {rank}"] = value
                for name, value in seconds.items():
                    each.setdefault(name, []).append(value)
            print(f"turn {repeat + 1}: done", flush=True)
    report = "\n\n".join([*header, *tables(found, options)])
    if options.output:
        options.output.write_text(report + "\n")
    print(f"\n{report}")


def directory_of(scratch: Path, num_tokens: int, shard_tokens: int) -> Path:
    return scratch / f"{num_tokens}-{shard_tokens}"


def in_new_process(directory: Path, rank: int, options: argparse.Namespace) -> dict[str, float]:
    """Start once in a new process, as the rank of a node; return what `one_start` does."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.stream_start", "--one", str(directory),
         "--batch_rows", str(options.batch_rows), "--seq_len", str(options.seq_len)],
        env={**os.environ, "LOCAL_RANK": str(rank), "RANK": str(rank)}, cwd=ROOT, check=True,
        stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


def one_start(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Start once; return its seconds, its CPU seconds, and the memory that it added."""
    gc.collect()
    before, cpu = memory_bytes(), time.process_time()
    seconds, kept = timed(lambda: first_batch(directory, 0, options, 0))
    cpu = time.process_time() - cpu
    after = memory_bytes()
    assert kept
    return {
        "one": seconds,
        "cpu": cpu,
        **{name: (after[name] - before[name]) / 1e6 for name in ("own", "shared")},
    }


def memory_bytes() -> dict[str, int]:
    """Return the memory of this process: its own, and that of mapped files, which is shared."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {key: int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile")}
    return {"own": sizes["RssAnon"], "shared": sizes["RssFile"]}


def measured(
    directory: Path, num_tokens: int, options: argparse.Namespace, repeat: int
) -> dict[str, float]:
    """Return {part: its seconds}."""
    windows = (num_tokens - 1) // options.seq_len
    late = windows * 9 // 10 // options.batch_rows * options.batch_rows
    seconds = {}
    for name, position in (("start", 0), ("resume", late)):
        seconds[name] = timed(lambda at=position: first_batch(directory, at, options, 2 * repeat))[
            0
        ]
    seconds["manifest"], files = timed(lambda: LocalFiles.open(directory))
    seconds["sizes"], problems = timed(files.problems)
    assert not problems
    source = open_source(directory)
    seconds["fingerprint"] = timed(lambda: source.fingerprint)[0]
    seconds["stream"], stream = timed(lambda: stream_of(source, 0, options, 2 * repeat + 1))
    seconds["batch"] = timed(lambda: next(iter(stream)))[0]
    if windows <= MAX_PERMUTED:
        seconds["stored"] = timed(lambda: permuted_batch(directory, windows, options, repeat))[0]
    return seconds


def tables(found: dict[Case, dict[str, list[float]]], options: argparse.Namespace) -> list[str]:
    start = [
        f"Batch {options.batch_rows} x {options.seq_len}, {options.repeats} turns, medians (least "
        f"to most), ms:",
        "",
        "| tokens | shards | first batch | first batch at 0.9 of an epoch | np.memmap, stored "
        "permutation |",
        "|---|---|---|---|---|",
    ]
    parts = [
        "Of the first batch, ms:",
        "",
        "| tokens | shards | read and check the manifest or the table | sizes | fingerprint | "
        "make the stream | read the batch |",
        "|---|---|---|---|---|---|---|",
    ]
    ranks = [
        "One start in a new process, without imports, CPU seconds and the memory that it adds:",
        "",
        "| tokens | shards | rank of the node | ms | CPU ms | own memory, MB | mapped, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for (tokens, shard_tokens, has_table), seconds in found.items():
        what = (
            f"| {tokens:.0e} | {-(-tokens // shard_tokens):,} of {shard_tokens * 2 / 1e6:,.0f} MB"
            f"{', with a table' if has_table else ''}"
        )
        for rank in (0, 1):
            one, cpu = (milliseconds(seconds[f"{name} {rank}"]) for name in ("one", "cpu"))
            own, shared = (
                f"{statistics.median(seconds[f'{name} {rank}']):.1f}" for name in ("own", "shared")
            )
            ranks.append(f"{what} | {rank} | {one} | {cpu} | {own} | {shared} |")
        start.append(
            f"{what} | {milliseconds(seconds['start'])} | {milliseconds(seconds['resume'])} | "
            f"{milliseconds(seconds['stored']) if 'stored' in seconds else 'does not fit'} |"
        )
        names = ("manifest", "sizes", "fingerprint", "stream", "batch")
        parts.append(f"{what} | {' | '.join(milliseconds(seconds[name]) for name in names)} |")
    return ["\n".join(start), "\n".join(parts), "\n".join(ranks)]


def milliseconds(seconds: list[float]) -> str:
    each = [1e3 * one for one in seconds]
    return f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"


def sparse_shards(directory: Path, num_tokens: int, shard_tokens: int) -> Path:
    """Write a shard directory whose token files are sparse files of the right size."""
    directory.mkdir()
    shards: list[dict[str, Any]] = []
    beside: dict[int, dict[str, bytes]] = {}
    digests: dict[bytes, str] = {}
    for number, start in enumerate(range(0, num_tokens, shard_tokens)):
        tokens = min(shard_tokens, num_tokens - start)
        name = f"shard-{number:05d}"
        with open(directory / f"{name}.bin", "wb") as file:
            file.truncate(2 * tokens)
        shard = {"file": f"{name}.bin", "num_tokens": tokens, "num_documents": 1}
        shard |= {"size_bytes": 2 * tokens, "sha256": sha256(str(number).encode()).hexdigest()}
        if tokens not in beside:
            one_end = np.array([tokens], "<u8").tobytes()
            beside[tokens] = {"index": one_end, "sums": checksums_of_zeros(2 * tokens)}
        for key, content in beside[tokens].items():
            path = directory / f"{name}.{SUFFIXES[key]}"
            like = number // MAX_LINKS * MAX_LINKS
            if number > like and tokens == shards[like]["num_tokens"]:
                os.link(directory / shards[like][key], path)
            else:
                path.write_bytes(content)
                digests[content] = sha256(content).hexdigest()
            shard |= {key: path.name, f"{key}_size_bytes": len(content)}
            shard |= {f"{key}_sha256": digests[content]}
        shards.append(shard)
    manifest = {
        "format": "zerolm-shards", "version": 1, "dtype": "uint16", "vocab_size": 50_000,
        "eos_id": 0, "num_tokens": num_tokens, "num_documents": len(shards),
        "tokenizer": {"name": "none", "fingerprint": "none", "files": []}, "shards": shards,
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2))
    return directory


def checksums_of_zeros(size: int) -> bytes:
    blocks, rest = divmod(size, BLOCK_BYTES)
    last = [xxhash.xxh3_64_intdigest(bytes(rest))] if rest else []
    full = xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES))
    return np.concatenate([np.full(blocks, full, "<u8"), np.array(last, "<u8")]).tobytes()


def first_batch(directory: Path, position: int, options: argparse.Namespace, seed: int) -> Any:
    source = open_source(directory)
    assert source.fingerprint
    stream = stream_of(source, position, options, seed)
    return stream, next(iter(stream))


def stream_of(source: Any, position: int, options: argparse.Namespace, seed: int) -> TokenStream:
    return TokenStream(
        [source],
        [1.0],
        seq_len=options.seq_len,
        seed=seed,
        batch_schedule=BatchSchedule(options.batch_rows),
        micro_batch_size=options.batch_rows,
        rank=0,
        world_size=1,
        position=position,
        end_position=position + (1 << 40),
    )


def permuted_batch(
    directory: Path, windows: int, options: argparse.Namespace, seed: int
) -> torch.Tensor:
    """Read a batch of the first shard's windows in the order of a permutation of all windows."""
    tokens = np.memmap(directory / "shard-00000.bin", np.uint16, mode="r")
    order = np.random.default_rng(seed).permutation(windows) % (len(tokens) // options.seq_len)
    rows = [
        tokens[row * options.seq_len :][: options.seq_len + 1].astype(np.int64)
        for row in order[: options.batch_rows].tolist()
    ]
    return torch.from_numpy(np.stack([row[: options.seq_len] for row in rows]))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    main()
