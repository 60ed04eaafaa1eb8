"""Assembles shards from parts: in background threads during encoding, or as tasks afterwards.

A shard's bytes depend neither on how documents are divided into parts (see
`data_prep.encode.shard_plan`), nor on whether a thread or a task assembles the shard.
"""

import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from data_prep.encode.resume import discard_damaged
from data_prep.encode.shard_plan import Shard, Slice, parts_of_unit, plan_output, plan_shards
from data_prep.encode.write_shard import write_shard
from data_prep.tasks.phases import Executor, LocalExecutor, Phase, Record, fingerprint, run_phase
from zerolm.common.files import sha256_file
from zerolm.shards.manifest import files_of

SINGLE_PROCESS_BYTES = 1 << 28  # below this size, copying takes less time than starting processes
MAX_LEFT_BYTES = 1 << 28  # if more is left when encoding ends, tasks replace the threads

Entry = dict[str, Any]  # a shard's entry in the manifest


def run_assembly(
    directories: Sequence[Path],
    parts: Path,
    records: Sequence[Record],
    shard_tokens: int,
    token_bytes: int,
    assembled: Mapping[tuple[Path, int], Entry],
    executor: Executor,
) -> list[list[Entry]]:
    """Assemble all missing shards, and return the manifest entries of each output's shards.

    Args:
        directories: the output directories; any other shards there are removed.
        records: records of all units, as returned by `EncodeUnits`.
        assembled: manifest entries of the shards that `BackgroundAssembly` has already assembled.
    """
    shards = [
        shard
        for split, directory in enumerate(directories)
        for shard in plan_output(directory, parts, records, split, shard_tokens, token_bytes)
    ]
    entries = [assembled.get((shard.directory, shard.number)) for shard in shards]
    phase = Phase(
        name="tokenize.assemble",
        directory=parts,
        num_tasks=len(shards),
        run=AssembleShards(tuple(shards), token_bytes, parts.absolute(), tuple(entries)),
        inputs=fingerprint([shard_tokens, [record["checksums"] for record in records]]),
        labels=[f"{shard.directory / shard.name}.bin" for shard in shards],
        sync=False,
    )
    intact = discard_damaged(phase, lambda task, record: _is_intact(shards[task], record["shard"]))
    complete = {*intact, *(task for task, entry in enumerate(entries) if entry is not None)}
    _remove_other_shards(directories, [shards[task] for task in complete])
    tokens_left = sum(each.num_tokens for task, each in enumerate(shards) if task not in complete)
    is_small = tokens_left * token_bytes < SINGLE_PROCESS_BYTES
    results = run_phase(phase, LocalExecutor(1) if is_small else executor)
    _remove_other_shards(directories, shards)
    by_output: list[list[Entry]] = [[] for _ in directories]
    for shard, record in zip(shards, results, strict=True):
        by_output[directories.index(shard.directory)].append(record["shard"])
    return by_output


@dataclass(frozen=True)
class AssembleShards:
    """Task j assembles shard j; its record contains the shard's manifest entry.

    Args:
        relative_to: directory that file names in the task records are relative to.
        entries: each shard's manifest entry if it is already assembled, otherwise None.
    """

    shards: tuple[Shard, ...]
    token_bytes: int
    relative_to: Path
    entries: tuple[Entry | None, ...]

    def __call__(self, task: int) -> dict[str, Any]:
        """Write a shard's files unless it is already assembled, and return the task record."""
        shard = self.shards[task]
        entry = self.entries[task]
        if entry is None:
            entry = write_shard(shard.directory, shard.number, shard.slices, self.token_bytes)
        assert entry["num_tokens"] == shard.num_tokens, f"{shard.name} differs from its plan"
        written = [shard.directory / name for name, _, _ in files_of(entry)]
        return {
            "shard": entry,
            "files": {
                os.path.relpath(path, self.relative_to): path.stat().st_size for path in written
            },
            "documents_out": entry["num_documents"],
        }


class BackgroundAssembly:
    """Assembles shards during encoding, in one thread per output."""

    def __init__(
        self, directories: Sequence[Path], parts: Path, shard_tokens: int, token_bytes: int
    ):
        self.directories, self.parts = directories, parts
        self.shard_tokens, self.token_bytes = shard_tokens, token_bytes
        self._records: dict[int, Record] = {}  # records waiting for an earlier unit's
        self._next_unit = 0
        self._queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in directories]
        self._threads: list[threading.Thread] = []
        self._entries: dict[tuple[Path, int], Entry] = {}
        self._errors: list[BaseException] = []
        self._all_added = self._stopped = False
        self._tokens_left = [0] * len(directories)

    def __enter__(self) -> "BackgroundAssembly":
        return self

    def start(self) -> None:
        """Start the threads."""
        for split in range(len(self.directories)):
            self._threads.append(threading.Thread(target=self._run, args=(split,), daemon=True))
            self._threads[-1].start()

    def add(self, record: Record) -> None:
        """Add the record of an encoded unit; units may be added in any order."""
        self._records[record["task"]] = record
        while (record := self._records.pop(self._next_unit, {})) != {}:
            self._next_unit += 1
            for split, part_queue in enumerate(self._queues):
                for part in parts_of_unit(record, self.parts, split):
                    self._tokens_left[split] += part[2]
                    part_queue.put(part)

    def finish(self) -> dict[tuple[Path, int], Entry]:
        """Wait for the threads; return the assembled shards' manifest entries, by directory and
        number.
        """
        self._all_added = True
        self._join()
        for error in self._errors:
            raise error
        return self._entries

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._join()

    def _join(self) -> None:
        for part_queue, thread in zip(self._queues, self._threads, strict=False):
            part_queue.put(None)  # the end
            thread.join()

    def _run(self, split: int) -> None:
        directory = self.directories[split]
        part_queue = iter(self._queues[split].get, None)
        slices = plan_shards(part_queue, self.shard_tokens, self.token_bytes)
        try:
            for number, group in groupby(slices, itemgetter(0)):
                if self._all_added and self._tokens_left[split] * self.token_bytes > MAX_LEFT_BYTES:
                    return
                shard_slices = self._until_stopped(group)
                entry = write_shard(directory, number, shard_slices, self.token_bytes)
                self._tokens_left[split] -= entry["num_tokens"]
                self._entries[directory, number] = entry
        except _Stopped:
            pass
        except BaseException as error:  # `finish` raises it
            self._errors.append(error)

    def _until_stopped(self, slices: Iterable[tuple[int, Slice]]) -> Iterator[Slice]:
        for _, each in slices:
            yield each
            if self._stopped:
                raise _Stopped
        if self._stopped:
            raise _Stopped


class _Stopped(Exception):
    pass


def _is_intact(shard: Shard, entry: Entry) -> bool:
    """Return whether all files of a shard match their checksums."""
    return all(sha256_file(shard.directory / name) == sha256 for name, _, sha256 in files_of(entry))


def _remove_other_shards(directories: Sequence[Path], shards: Sequence[Shard]) -> None:
    """Remove unfinished files, and all shards except the given shards."""
    kept = {(shard.directory, shard.name) for shard in shards}
    for directory in directories:
        for path in directory.glob("shard-*"):
            if path.suffix == ".tmp" or (directory, path.name.partition(".")[0]) not in kept:
                path.unlink(missing_ok=True)
