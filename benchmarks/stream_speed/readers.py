"""The readers that benchmarks/stream_speed compares, each measured in a new process.

    python -m benchmarks.stream_speed.readers write READER DIRECTORY TOKENS.bin --seq_len T
    python -m benchmarks.stream_speed.readers read READER DIRECTORY TOKENS.bin --seq_len T [...]

`write` writes the token IDs in the reader's format; `read` prints one line of JSON. Every reader
returns each window of one epoch once, shuffled, as int64 inputs and targets.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.stream_speed.copies import import_streaming, windows, write

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def zerolm(directory: Path, options: argparse.Namespace) -> Batches:
    from zerolm.data.loader import TokenStream, make_loader
    from zerolm.optim.schedule import BatchSchedule
    from zerolm.shards.reader import open_source

    source = open_source(directory)
    stream = TokenStream(
        [source], [1.0], seq_len=options.seq_len, seed=options.seed,
        batch_schedule=BatchSchedule(options.batch_rows), micro_batch_size=options.batch_rows,
        shard=0, num_shards=1, position=0, end_position=(source.num_tokens - 1) // options.seq_len,
    )  # fmt: skip
    loader = make_loader(stream, options.workers, pin_memory=False)
    return ((batch["input_ids"], batch["targets"]) for batch in loader)


class MemoryMap(IterableDataset):
    """The usual loop: nanoGPT's `get_batch`, with each window once and a loader's workers.

    Source: https://github.com/karpathy/nanoGPT/blob/master/train.py
    """

    def __init__(self, path: Path, options: argparse.Namespace):
        self.path, self.seq_len, self.rows = path, options.seq_len, options.batch_rows
        count = (path.stat().st_size // 2 - 1) // self.seq_len
        self.order = np.random.default_rng(options.seed).permutation(count) * self.seq_len

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batches = self.order[: len(self.order) // self.rows * self.rows].reshape(-1, self.rows)
        worker = get_worker_info()
        for starts in batches[worker.id :: worker.num_workers] if worker else batches:
            yield self.read(starts)

    def read(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(self.path, dtype=np.uint16, mode="r")  # opened each time, as in nanoGPT
        x, y = (
            torch.stack(
                [
                    torch.from_numpy(data[i + shift : i + shift + self.seq_len].astype(np.int64))
                    for i in starts
                ]
            )
            for shift in (0, 1)
        )
        return x, y


class TightMap(MemoryMap):
    """The same, optimized: one plain array, one conversion, targets as a view."""

    def __init__(self, path: Path, options: argparse.Namespace):
        super().__init__(path, options)
        self.data = np.memmap(path, np.uint16, mode="r").view(np.ndarray)

    def read(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        batch = np.empty((self.rows, self.seq_len + 1), np.int64)
        for row, start in zip(batch, starts.tolist(), strict=True):
            row[:] = self.data[start : start + self.seq_len + 1]
        both = torch.from_numpy(batch)
        return both[:, :-1], both[:, 1:]


def memory_map(directory: Path, options: argparse.Namespace, kind: type = MemoryMap) -> Batches:
    dataset = kind(directory / "ids.bin", options)
    if not options.workers:
        return dataset
    return DataLoader(dataset, batch_size=None, num_workers=options.workers)


def mosaic(directory: Path, options: argparse.Namespace) -> Batches:
    dataset = import_streaming().StreamingDataset(
        local=str(directory), shuffle=True, batch_size=options.batch_rows, shuffle_seed=options.seed
    )
    return DataLoader(
        dataset, options.batch_rows, num_workers=options.workers, collate_fn=_collate_mds
    )


def _collate_mds(samples: list[dict[str, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    return both[:, :-1], both[:, 1:]


def litdata(directory: Path, options: argparse.Namespace) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.item_loader import TokensLoader

    dataset = StreamingDataset(
        str(directory),
        item_loader=TokensLoader(options.seq_len + 1),
        shuffle=True,
        seed=options.seed,
    )
    loader = StreamingDataLoader(
        dataset, batch_size=options.batch_rows, num_workers=options.workers
    )
    return ((both[:, :-1], both[:, 1:]) for both in (batch.long() for batch in loader))


READERS: dict[str, Any] = {
    "zerolm": zerolm,
    "np.memmap, nanoGPT's loop": memory_map,
    "np.memmap, tight": lambda *arguments: memory_map(*arguments, kind=TightMap),
    "mosaicml-streaming": mosaic,
    "litdata": litdata,
}


def read(reader: str, directory: Path, ids: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Read one epoch, or its first batches, and return the measurements."""
    prepare = {"mosaicml-streaming": import_streaming, "litdata": lambda: __import__("litdata")}
    if reader == "zerolm":
        __import__("zerolm.data.loader")
    else:
        prepare.get(reader, lambda: None)()
    gc.collect()
    rows = num_batches = 0
    digests: list[int] = []
    disk, started = disk_bytes(), time.perf_counter()
    first_at = started
    batches = iter(READERS[reader](directory, options))
    for inputs, targets in batches:
        if not num_batches:
            first_at = time.perf_counter()
            rows -= len(inputs)  # the first batch is not part of the rate
        num_batches, rows = num_batches + 1, rows + len(inputs)
        if options.verify:
            both = torch.cat([inputs, targets[:, -1:]], dim=1).numpy()
            digests += [xxhash.xxh3_64_intdigest(row.tobytes()) for row in both]
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
        if num_batches == options.batches:
            break
    seconds = time.perf_counter() - first_at
    result = {
        "first_batch_seconds": first_at - started,
        "tokens_per_second": rows * options.seq_len / seconds,
        "disk_bytes": disk_bytes() - disk,
        "rows": rows + len(inputs),
    }
    if options.verify:
        raw = np.fromfile(ids, np.uint16)
        expected = {
            xxhash.xxh3_64_intdigest(window.astype(np.int64).tobytes())
            for window in windows(raw, options.seq_len)
        }
        result["windows"] = len(expected)
        result["same_windows"] = len(expected & set(digests))
        result["twice"] = len(digests) - len(set(digests))
    return result


def disk_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("write", "read"))
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--seq_len", type=int, required=True)
    parser.add_argument("--batch_rows", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batches", type=int, default=0, help="batches to read; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.action == "write":
        ids = np.fromfile(options.ids, np.uint16)
        write(options.reader, options.directory, ids, options)
    else:
        print(json.dumps(read(options.reader, options.directory, options.ids, options)))


if __name__ == "__main__":
    main()
