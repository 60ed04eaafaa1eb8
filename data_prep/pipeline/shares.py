"""Counts the documents, bytes and tokens of a source by the values of keys.

Twice: "before" are the documents that `clean` wrote, and those that it dropped if they were kept;
"after" are the documents of the last text stage. One phase reads both. Tokens are counted exactly,
from the document ends of the shards, which are in the order of the last stage. Writes
`shares.json`.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from data_prep.dedup.arrays import array_path, load_array, save_array, task_record
from data_prep.encode.held_out import is_held_out
from data_prep.filters.score_filters import value_at
from data_prep.read.parse import find_text
from data_prep.read.stage_files import read_stage, read_stage_lines
from data_prep.tasks.phases import Executor, Phase, fingerprint, run_phase
from zerolm.common.files import sha256_file, write_atomically, write_json
from zerolm.common.records import read_record
from zerolm.shards.reader import open_source

SHARES = "shares.json"
WORK = "shares"  # directory of the phase; removed when it is done
MAX_GROUPS = 200  # of a key, in shares.json; the others are added up
MAX_NAME = 200  # characters
NONE, OTHERS = "(none)", "(others)"

Json = dict[str, Any]


@dataclass(frozen=True)
class CountTask:
    """Counts the documents of one file by the value of each key."""

    paths: tuple[Path, ...]
    directory: Path
    text_field: str
    keys: tuple[str, ...]
    val_fraction: float

    def __call__(self, task: int) -> Json:
        names: list[dict[str, int]] = [{} for _ in self.keys]
        rows: list[list[int]] = []
        for text, record in self._read(self.paths[task]):
            utf8 = text.encode()
            is_own = bool(self.val_fraction) and is_held_out(utf8, self.val_fraction)
            row = [len(utf8), int(is_own)]
            for key, known in zip(self.keys, names, strict=True):
                row.append(known.setdefault(group_of(record, key), len(known)))
            rows.append(row)
        path = array_path(self.directory, "counts", task)
        array = np.array(rows, np.int64).reshape(-1, 2 + len(self.keys))
        sizes = {path: save_array(path, array)}
        names_path = path.with_suffix(".names.json")
        content = json.dumps([list(known) for known in names]).encode("utf-8", "surrogatepass")
        write_atomically(names_path, content, many_writers=True)
        sizes[names_path] = names_path.stat().st_size
        return task_record(self.directory, sizes, documents_in=len(rows))

    def _read(self, path: Path) -> Iterator[tuple[str, Json]]:
        for line in read_stage_lines(path):
            record = json.loads(line)
            yield find_text(record, self.text_field)[1], record


def group_of(record: Mapping[str, Any], key: str) -> str:
    """Return the value of a key as a string; `domain` may be the host of the key `url`."""
    value = value_at(record, key)
    if value is None and key == "domain":
        try:
            value = urlsplit(str(record.get("url", ""))).hostname or None
        except ValueError:  # an invalid URL
            value = None
        value = value and value.removeprefix("www.")
    if value is None:
        return NONE
    return (value if isinstance(value, str) else json.dumps(value))[:MAX_NAME]


def count_shares(
    directory: Path,
    last_stage: Path,
    shards: Sequence[Path],
    keys: Sequence[str],
    val_fraction: float,
    executor: Executor,
) -> None:
    """Write `shares.json` of a source, unless it is up to date.

    Args:
        shards: training and held-out shards; empty if there are none.
    """
    first, last = read_stage(directory / "clean"), read_stage(last_stage)
    dropped = tuple(sorted((directory / "clean" / "dropped").glob("*.jsonl.zst")))
    before = (*first.paths, *dropped)
    manifests = [*(path / "stage.json" for path in (first.directory, last.directory))]
    manifests += [path / "manifest.json" for path in shards]
    key = fingerprint([[sha256_file(path) for path in manifests], list(keys), val_fraction])
    if (published := read_record(directory / SHARES, dict)) and published.get("inputs") == key:
        return
    paths, work = (*before, *last.paths), directory / WORK
    task = CountTask(paths, work, first.text_field, tuple(keys), val_fraction)
    run_phase(Phase("shares", work, len(paths), task, key), executor)
    lengths = [_Lengths(path) for path in shards]
    is_complete = False
    if lengths:
        num_documents = sum(each.num_documents for each in lengths)
        is_complete = num_documents == last.manifest["documents_out"]
    ends = {
        "before": _totals(work, range(len(before)), keys, []),
        "after": _totals(work, range(len(before), len(paths)), keys, lengths * is_complete),
    }
    shares = {
        "inputs": key,
        "before": "read" if dropped else "kept by clean",
        "after": f"kept by {last.directory.name}",
        "has_tokens": is_complete,
        "keys": {key: _rows(ends, number) for number, key in enumerate(keys)},
    }
    write_json(directory / SHARES, shares)
    shutil.rmtree(work, ignore_errors=True)


class _Lengths:
    """The numbers of tokens of the documents of shards, in order."""

    def __init__(self, directory: Path):
        self.source = open_source(directory)
        self.num_documents = self.source.num_documents
        self.shard = 0
        self.left = np.empty(0, np.int64)

    def take(self, count: int) -> np.ndarray:
        """Return the lengths of the next documents."""
        parts = [self.left]
        found = len(self.left)
        while found < count:
            ends = self.source.document_ends(self.shard).astype(np.int64)
            parts.append(np.diff(ends, prepend=0))
            found += len(ends)
            self.shard += 1
        joined = np.concatenate(parts)
        self.left = joined[count:]
        return joined[:count]


def _totals(
    work: Path, tasks: Sequence[int], keys: Sequence[str], lengths: Sequence[_Lengths]
) -> list[dict[str, np.ndarray]]:
    """Return for each key {group: documents, bytes and tokens}, summed over files."""
    totals: list[dict[str, np.ndarray]] = [{} for _ in keys]
    for task in tasks:
        path = array_path(work, "counts", task)
        rows = np.array(load_array(path))
        names = json.loads(path.with_suffix(".names.json").read_bytes())
        tokens = np.zeros(len(rows), np.int64)
        for split, each in enumerate(lengths):
            is_own = rows[:, 1] == split
            tokens[is_own] = each.take(int(is_own.sum()))
        values = np.stack([np.ones(len(rows), np.int64), rows[:, 0], tokens], axis=1)
        for number, known in enumerate(names):
            sums = np.zeros((len(known), 3), np.int64)
            np.add.at(sums, rows[:, 2 + number], values)
            for name, row in zip(known, sums, strict=True):
                totals[number][name] = totals[number].get(name, 0) + row
    return totals


def _rows(ends: Mapping[str, list[dict[str, np.ndarray]]], number: int) -> Json:
    """Return the largest groups of a key, and the sum of the others."""
    before, after = ends["before"][number], ends["after"][number]
    nothing = np.zeros(3, np.int64)
    groups = sorted(
        {**before, **after},
        key=lambda name: (-before.get(name, nothing)[1], -after.get(name, nothing)[1], name),
    )
    shown = {
        name: [before.get(name, nothing).tolist(), after.get(name, nothing).tolist()]
        for name in groups[:MAX_GROUPS]
    }
    if others := groups[MAX_GROUPS:]:
        sums = [
            sum((end.get(name, nothing) for name in others), nothing) for end in (before, after)
        ]
        shown[OTHERS] = [each.tolist() for each in sums]
    return {"num_groups": len(groups), "groups": shown}
