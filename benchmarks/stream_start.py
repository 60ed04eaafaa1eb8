"""Seconds to the first batch, and to go on late in an epoch, by the size of the data.

    python -m benchmarks.stream_start [--output FILE]

Token shards of 1 M, 1 B and (simulated) 10 T ids are opened as a run opens them: the manifest is
checked, every file's size is compared with it, the fingerprint is taken, and the first batch is
read and compared with its blocks' sums, from sequence 0 and from nine tenths of an epoch on. 10 T
ids are there twice: in shards of 16 GiB, and in shards of the size that `data_prep tokenize` makes
by default. The second table says which part of the start takes how long.

The token files are holes of the right size: what is measured is what is computed and looked up
before the first batch, with the directory's entries in memory, not how fast a disk is (cold reads
are in benchmarks/stream_speed.py). Each repetition has another seed, and so other windows. Beside
it: np.memmap with a stored permutation, the usual way to shuffle, as far as it fits the memory.
"""

import argparse
import datetime
import json
import os
import statistics
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.stream_speed import hardware  # noqa: E402 - this file may be run as a script
from zerolm.block_sums import BLOCK_BYTES  # noqa: E402
from zerolm.data import TokenStream  # noqa: E402
from zerolm.manifest import read_manifest  # noqa: E402
from zerolm.schedule import BatchSchedule  # noqa: E402
from zerolm.shard_files import LocalFiles  # noqa: E402
from zerolm.shards import DEFAULT_SHARD_TOKENS, open_source  # noqa: E402

LARGE_SHARD_TOKENS = 1 << 33
CASES = (
    (10**6, DEFAULT_SHARD_TOKENS),
    (10**9, DEFAULT_SHARD_TOKENS),
    (10**13, LARGE_SHARD_TOKENS),
    (10**13, DEFAULT_SHARD_TOKENS),
)
SUFFIXES = {"index": "idx", "sums": "sums"}
MOST_PERMUTED = 1 << 28  # windows whose permutation is made at all
MOST_LINKS = 10_000  # to one file, which file systems limit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch_rows", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--output", type=Path, help="also write the tables here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = [f"{datetime.date.today()}; {hardware()}", f"`{' '.join(sys.orig_argv[1:])}`"]
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        directories = {
            case: hollow_shards(Path(scratch) / f"{case[0]}-{case[1]}", *case) for case in CASES
        }
        for repeat in range(options.repeats):
            for case, directory in directories.items():
                each = found.setdefault(case, {})
                for name, seconds in measured(directory, case[0], options, repeat).items():
                    each.setdefault(name, []).append(seconds)
            print(f"turn {repeat + 1}: done", flush=True)
    report = "\n\n".join([*about, *tables(found, options)])
    if options.output:
        options.output.write_text(report + "\n")
    print(f"\n{report}")


def measured(
    directory: Path, num_tokens: int, options: argparse.Namespace, repeat: int
) -> dict[str, float]:
    """Return the seconds of each thing that is measured."""
    windows = (num_tokens - 1) // options.seq_len
    late = windows * 9 // 10 // options.batch_rows * options.batch_rows
    took = {}
    for name, position in (("start", 0), ("resume", late)):
        took[name] = timed(lambda at=position: first_batch(directory, at, options, 2 * repeat))[0]
    took["manifest"], manifest = timed(lambda: read_manifest(directory))
    files = LocalFiles(directory, manifest)
    took["sizes"], problems = timed(files.problems)
    assert not problems
    source = open_source(directory)
    took["fingerprint"] = timed(lambda: source.fingerprint)[0]
    took["stream"], stream = timed(lambda: stream_of(source, 0, options, 2 * repeat + 1))
    took["batch"] = timed(lambda: next(iter(stream)))[0]
    if windows <= MOST_PERMUTED:
        took["stored"] = timed(lambda: permuted_batch(directory, windows, options, repeat))[0]
    return took


def tables(
    found: dict[tuple[int, int], dict[str, list[float]]], options: argparse.Namespace
) -> list[str]:
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
        "| tokens | shards | read and check the manifest | sizes of all files | fingerprint | "
        "make the stream | read the batch |",
        "|---|---|---|---|---|---|---|",
    ]
    for (tokens, shard_tokens), took in found.items():
        what = (
            f"| {tokens:.0e} | {-(-tokens // shard_tokens):,} of {shard_tokens * 2 / 1e6:,.0f} MB"
        )
        start.append(
            f"{what} | {milliseconds(took['start'])} | {milliseconds(took['resume'])} | "
            f"{milliseconds(took['stored']) if 'stored' in took else 'does not fit'} |"
        )
        names = ("manifest", "sizes", "fingerprint", "stream", "batch")
        parts.append(f"{what} | {' | '.join(milliseconds(took[name]) for name in names)} |")
    return ["\n".join(start), "\n".join(parts)]


def milliseconds(seconds: list[float]) -> str:
    each = [1e3 * one for one in seconds]
    return f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"


def hollow_shards(directory: Path, num_tokens: int, shard_tokens: int) -> Path:
    """Write a shard directory whose token files are holes of the right size."""
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
            beside[tokens] = {"index": one_end, "sums": sums_of_zeros(2 * tokens)}
        for key, content in beside[tokens].items():
            path = directory / f"{name}.{SUFFIXES[key]}"
            like = number // MOST_LINKS * MOST_LINKS
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


def sums_of_zeros(size: int) -> bytes:
    blocks, rest = divmod(size, BLOCK_BYTES)
    last = [xxhash.xxh3_64_intdigest(bytes(rest))] if rest else []
    whole = xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES))
    return np.concatenate([np.full(blocks, whole, "<u8"), np.array(last, "<u8")]).tobytes()


def first_batch(directory: Path, position: int, options: argparse.Namespace, seed: int) -> None:
    source = open_source(directory)
    assert source.fingerprint
    next(iter(stream_of(source, position, options, seed)))


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
    """Read a batch of the first shard's windows in the order of a permutation of all."""
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
