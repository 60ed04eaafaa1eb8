"""Tokens per second of TokenStream against a bare `np.memmap` batch reader.

    python benchmarks/stream_speed.py

Both read the same shard (synthetic, about 200 MB, in the page cache) in batches of the same size
with the same number of torch DataLoader workers, and hand out int64 inputs and targets in a
shuffled order. With 0 workers the bare readers are plain loops, without a DataLoader around them.
What a bare reader lacks: several sources and shards, weights, epochs, a position to resume from, an
order that survives another number of ranks.

There are two bare readers. The first is what one writes: cut each row out of the memory map,
convert it, stack the rows. The second is as tight as we could make one: a plain array instead of
np.memmap, rows cast straight into one buffer, inputs and targets overlapping views of it (the
stream's are separate contiguous tensors).

The stream is also measured without the sums of blocks, that is as it reads without checking them;
with them each block is checked in each measurement anew, when it is first read.

Repetitions are interleaved, so that a machine that slows down slows all of them; ratios are taken
within a repetition, and the table has their medians.
"""

import argparse
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from zerolm.data import TokenStream, make_loader  # noqa: E402 - this file is run as a script
from zerolm.schedule import BatchSchedule  # noqa: E402
from zerolm.shard_writer import ShardWriter  # noqa: E402
from zerolm.shards import Source, open_source  # noqa: E402

VOCAB_SIZE, EOS_ID, DOCUMENT_TOKENS = 50_000, 0, 1000
STREAM, BARE, TIGHT = "TokenStream", "bare np.memmap reader", "tight reader"
UNCHECKED = "TokenStream without sums"


class BareReader(IterableDataset):
    """Batches from one token file, in an order that was shuffled before."""

    def __init__(self, path: Path, num_rows: int, seq_len: int, batch_rows: int, seed: int):
        self.tokens = np.memmap(path, np.uint16, mode="r")
        self.seq_len, self.batch_rows = seq_len, batch_rows
        num_windows = (len(self.tokens) - 1) // seq_len
        order = np.random.default_rng(seed).permutation(num_windows) * seq_len
        self.starts = np.resize(order, num_rows).reshape(-1, batch_rows)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        mine = self.starts[worker.id :: worker.num_workers] if worker else self.starts
        for starts in mine:
            batch = self.read(starts)
            yield batch[:, :-1], batch[:, 1:]

    def read(self, starts: np.ndarray) -> torch.Tensor:
        length = self.seq_len + 1
        rows = [self.tokens[start : start + length].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))


class TightReader(BareReader):
    """The same without what can be avoided."""

    def read(self, starts: np.ndarray) -> torch.Tensor:
        length = self.seq_len + 1
        tokens = self.tokens.view(np.ndarray)
        batch = np.empty((self.batch_rows, length), np.int64)
        for row, start in zip(batch, starts.tolist(), strict=True):
            row[:] = tokens[start : start + length]
        return torch.from_numpy(batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch_rows", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the shard")
    parser.add_argument("--num_workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=2000, help="in each measurement")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        source = write_source(Path(scratch) / "shards", arguments.megabytes)
        for num_workers in arguments.num_workers:
            rates[num_workers] = {STREAM: [], BARE: [], TIGHT: [], UNCHECKED: []}
            for repeat in range(arguments.repeats):
                for name in rates[num_workers]:
                    loader = make(name, source, num_workers, arguments, seed=repeat)
                    rate = tokens_per_second(loader, arguments)
                    rates[num_workers][name].append(rate)
            print(f"{num_workers} workers: done", flush=True)
    report = table(rates, arguments)
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print(f"\n{report}")


def write_source(directory: Path, megabytes: int) -> Source:
    """Write one shard of random documents, and read it once so that it is in the page cache."""
    generator = np.random.default_rng(0)
    tokenizer = {"name": "none", "fingerprint": "none", "files": []}
    documents = 500
    with ShardWriter(
        directory, vocab_size=VOCAB_SIZE, eos_id=EOS_ID, tokenizer=tokenizer, shard_tokens=1 << 40
    ) as writer:
        for _ in range(megabytes * 1_000_000 // (2 * documents * DOCUMENT_TOKENS)):
            ids = generator.integers(1, VOCAB_SIZE, documents * DOCUMENT_TOKENS, dtype=np.uint16)
            ends = np.arange(1, documents + 1) * DOCUMENT_TOKENS
            ids[ends - 1] = EOS_ID
            writer.add(ids, ends)
    source = open_source(directory)
    source.shard(0).sum()
    return source


def make(
    name: str, source: Source, num_workers: int, arguments: argparse.Namespace, seed: int
) -> Iterable[Any]:
    batch_rows, seq_len = arguments.batch_rows, arguments.seq_len
    num_rows = (arguments.batches + warmup_batches(arguments)) * batch_rows
    if name in (STREAM, UNCHECKED):
        opened = open_source(source.directory)  # anew: a block is checked when it is first read
        for shard in opened.manifest["shards"] if name == UNCHECKED else ():
            del shard["sums"]
        stream = TokenStream(
            [opened],
            [1.0],
            seq_len=seq_len,
            seed=seed,
            batch_schedule=BatchSchedule(batch_rows),
            micro_batch_size=batch_rows,
            rank=0,
            world_size=1,
            position=0,
            end_position=num_rows,
        )
        return make_loader(stream, num_workers, pin_memory=False)
    path = source.directory / source.manifest["shards"][0]["file"]
    reader = (BareReader if name == BARE else TightReader)(
        path, num_rows, seq_len, batch_rows, seed
    )
    return DataLoader(reader, batch_size=None, num_workers=num_workers) if num_workers else reader


def warmup_batches(arguments: argparse.Namespace) -> int:
    """Batches that are not timed: they hold the start of the workers."""
    return arguments.batches // 4


def tokens_per_second(loader: Iterable[Any], arguments: argparse.Namespace) -> float:
    batches = iter(loader)
    for _ in itertools.islice(batches, warmup_batches(arguments)):
        pass
    started = time.perf_counter()
    count = sum(1 for _ in batches)
    seconds = time.perf_counter() - started
    assert count == arguments.batches, (count, arguments.batches)
    return count * arguments.batch_rows * arguments.seq_len / seconds


def table(rates: dict[int, dict[str, list[float]]], arguments: argparse.Namespace) -> str:
    lines = [
        f"batch {arguments.batch_rows} x {arguments.seq_len}, {arguments.megabytes} MB of uint16, "
        f"median of {arguments.repeats} interleaved repetitions; Python "
        f"{platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, "
        f"{os.cpu_count()} cores",
        "",
        f"| workers | {STREAM} Mtok/s | {BARE} Mtok/s | ratio | {TIGHT} Mtok/s | ratio | "
        f"{UNCHECKED} Mtok/s | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for num_workers, by_name in rates.items():
        cells = [f"{statistics.median(by_name[STREAM]) / 1e6:.0f}"]
        for name in (BARE, TIGHT, UNCHECKED):
            ratios = [
                mine / theirs for mine, theirs in zip(by_name[STREAM], by_name[name], strict=True)
            ]
            cells.append(f"{statistics.median(by_name[name]) / 1e6:.0f}")
            cells.append(
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        lines.append(f"| {num_workers} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
