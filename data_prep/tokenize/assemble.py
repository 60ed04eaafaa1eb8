"""Parts to shards: which slices of which parts each shard is, and who writes it.

The limits of shards follow from the lengths of documents alone (data_prep/parts.py), so a shard's
bytes do not depend on how the documents lay in parts, nor on who assembles it: threads while
documents are still encoded, or the tasks of a phase behind that.
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

from data_prep.parts import Slice, plan_shards
from data_prep.phases import Executor, LocalExecutor, Phase, Record, fingerprint, run_phase
from data_prep.reuse import keep_whole
from data_prep.write_shard import write_shard
from zerolm.files import sha256_file
from zerolm.manifest import files_of

SMALL_BYTES = 1 << 28  # of shards: copying them takes less time than starting processes
LATE_BYTES = 1 << 28  # left to assemble at the end: more is shared among workers


@dataclass(frozen=True)
class Shard:
    """One shard that is to be made."""

    directory: Path
    number: int
    slices: tuple[Slice, ...]

    @property
    def name(self) -> str:
        """Its files' name without their suffixes."""
        return f"shard-{self.number:05d}"

    @property
    def num_tokens(self) -> int:
        """How many ids it has."""
        return sum(each.last_token - each.first_token for each in self.slices)


def run_assembly(
    directories: Sequence[Path],
    parts: Path,
    records: Sequence[Record],
    shard_tokens: int,
    token_bytes: int,
    made: Mapping[tuple[Path, int], dict[str, Any]],
    executor: Executor,
) -> list[list[dict[str, Any]]]:
    """Make the shards that are not there yet; return the manifests' entries for each output.

    Args:
        directories: of the outputs; what else is called a shard there is removed.
        parts: the directory of the parts.
        records: of all units, as `EncodeUnits` gives them.
        made: the entries of shards that `AssembleAhead` has made.
    """
    shards = [
        shard
        for split, directory in enumerate(directories)
        for shard in _plan(directory, parts, records, split, shard_tokens)
    ]
    entries = [made.get((shard.directory, shard.number)) for shard in shards]
    phase = Phase(
        name="tokenize.assemble",
        directory=parts,
        num_tasks=len(shards),
        run=AssembleShards(tuple(shards), token_bytes, parts.absolute(), tuple(entries)),
        inputs=fingerprint([shard_tokens, [record["checksums"] for record in records]]),
        labels=[f"{shard.directory / shard.name}.bin" for shard in shards],
        sync=False,
    )
    kept = keep_whole(phase, lambda task, record: _is_whole(shards[task], record["shard"]))
    there = {*kept, *(task for task, entry in enumerate(entries) if entry is not None)}
    _remove_others(directories, [shards[task] for task in there])
    num_left = sum(each.num_tokens for task, each in enumerate(shards) if task not in there)
    is_small = num_left * token_bytes < SMALL_BYTES
    results = run_phase(phase, LocalExecutor(1) if is_small else executor)
    _remove_others(directories, shards)
    listed: list[list[dict[str, Any]]] = [[] for _ in directories]
    for shard, record in zip(shards, results, strict=True):
        listed[directories.index(shard.directory)].append(record["shard"])
    return listed


@dataclass(frozen=True)
class AssembleShards:
    """Task j makes shard j; its record has the shard's entry of the manifest.

    Args:
        token_bytes: of an id in the parts and in the shards.
        relative_to: where names of files in the record begin.
        entries: of the shards that are made already, None for the others.
    """

    shards: tuple[Shard, ...]
    token_bytes: int
    relative_to: Path
    entries: tuple[dict[str, Any] | None, ...]

    def __call__(self, task: int) -> dict[str, Any]:
        """Write the files of a shard; `OSError` as writing raises it."""
        shard = self.shards[task]
        entry = self.entries[task]
        if entry is None:
            entry = write_shard(shard.directory, shard.number, shard.slices, self.token_bytes)
        assert entry["num_tokens"] == shard.num_tokens, f"{shard.name} is not what was planned"
        written = [shard.directory / name for name, _, _ in files_of(entry)]
        return {
            "shard": entry,
            "files": {
                os.path.relpath(path, self.relative_to): path.stat().st_size for path in written
            },
            "documents_out": entry["num_documents"],
        }


class AssembleAhead:
    """Assembles shards while documents are still encoded, in a thread for each output.

    Args:
        directories: of the outputs.
        parts: the directory of the parts.
    """

    def __init__(
        self, directories: Sequence[Path], parts: Path, shard_tokens: int, token_bytes: int
    ):
        self.directories, self.parts = directories, parts
        self.shard_tokens, self.token_bytes = shard_tokens, token_bytes
        self._records: dict[int, Record] = {}  # of units that others before them are missing for
        self._next_unit = 0
        self._queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in directories]
        self._threads: list[threading.Thread] = []
        self._entries: dict[tuple[Path, int], dict[str, Any]] = {}
        self._errors: list[BaseException] = []
        self._is_ended = self._is_stopped = False
        self._num_left = [0] * len(directories)  # tokens

    def __enter__(self) -> "AssembleAhead":
        return self

    def start(self) -> None:
        """Begin."""
        for split in range(len(self.directories)):
            self._threads.append(threading.Thread(target=self._run, args=(split,), daemon=True))
            self._threads[-1].start()

    def add(self, record: Record) -> None:
        """Take the record of a unit, in any order of the units."""
        self._records[record["task"]] = record
        while (record := self._records.pop(self._next_unit, {})) != {}:
            self._next_unit += 1
            for split, parts in enumerate(self._queues):
                for part in _parts_of(record, self.parts, split):
                    self._num_left[split] += part[2]
                    parts.put(part)

    def finish(self) -> dict[tuple[Path, int], dict[str, Any]]:
        """Return the manifest's entries of the shards that are made, by directory and number.

        Raises:
            OSError: one could not be written.
        """
        self._is_ended = True
        self._join()
        for error in self._errors:
            raise error
        return self._entries

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True
        self._join()

    def _join(self) -> None:
        for parts, thread in zip(self._queues, self._threads, strict=False):
            parts.put(None)
            thread.join()

    def _run(self, split: int) -> None:
        directory = self.directories[split]
        slices = plan_shards(iter(self._queues[split].get, None), self.shard_tokens)
        try:
            for number, group in groupby(slices, itemgetter(0)):
                if self._is_ended and self._num_left[split] * self.token_bytes > LATE_BYTES:
                    return
                entry = write_shard(directory, number, self._while(group), self.token_bytes)
                self._num_left[split] -= entry["num_tokens"]
                self._entries[directory, number] = entry
        except _Stopped:
            pass
        except BaseException as error:  # `finish` raises it
            self._errors.append(error)

    def _while(self, slices: Iterable[tuple[int, Slice]]) -> Iterator[Slice]:
        for _, each in slices:
            yield each
            if self._is_stopped:
                raise _Stopped
        if self._is_stopped:
            raise _Stopped


class _Stopped(Exception):
    pass


def _plan(
    directory: Path, parts: Path, records: Sequence[Record], split: int, shard_tokens: int
) -> list[Shard]:
    """Return the shards of a split of all units, which are in the records of `EncodeUnits`."""
    made_of = (each for record in records for each in _parts_of(record, parts, split))
    return [
        Shard(directory, number, tuple(each for _, each in group))
        for number, group in groupby(plan_shards(made_of, shard_tokens), itemgetter(0))
    ]


def _parts_of(record: Record, parts: Path, split: int) -> list[tuple[str, int, int]]:
    return [
        (str((parts / name).absolute()), num_documents, num_tokens)
        for name, num_documents, num_tokens in record["parts"][split]
    ]


def _is_whole(shard: Shard, entry: dict[str, Any]) -> bool:
    """Say whether the files of a shard are as they were written; all of them are read."""
    return all(sha256_file(shard.directory / name) == sha256 for name, _, sha256 in files_of(entry))


def _remove_others(directories: Sequence[Path], shards: Sequence[Shard]) -> None:
    """Remove all shards in some directories but for these, and what was never finished."""
    kept = {(shard.directory, shard.name) for shard in shards}
    for directory in directories:
        for path in directory.glob("shard-*"):
            if path.suffix == ".tmp" or (directory, path.name.partition(".")[0]) not in kept:
                path.unlink(missing_ok=True)
