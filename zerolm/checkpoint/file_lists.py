"""`FILES.jsonl` in a checkpoint of many ranks: the manifest's file entries, split into lists.

Every rank reads the manifest, whose size would grow with the number of ranks. So the manifest
contains only the entries of files that all ranks share, and the position and checksum of each list.
A list contains the entries for the files of `LISTED_RANKS` ranks. A rank then reads a few
kilobytes, however many ranks there are. A list must match its checksum in the manifest. Must not
know directories.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from zerolm.checkpoint.checksums import XXH3, Piece, RangeHash, share
from zerolm.checkpoint.manifest import FILES, LISTS_VERSION, ListedFile, files_problem
from zerolm.common.errors import CheckpointError, RecordError
from zerolm.common.files import write_atomically
from zerolm.common.records import open_regular, parse_record, unreadable
from zerolm.ds_files.pieces import SHARDS

LISTED_RANKS = 64


class _Content(TypedDict):
    files: list[ListedFile]


def with_lists(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Move entries to lists if there are over `LISTED_RANKS` ranks; return the new manifest."""
    own = sorted((e for e in manifest["files"] if "rank" in e), key=lambda entry: entry["rank"])
    groups = [
        (number, list(entries))
        for number, entries in groupby(own, key=lambda entry: entry["rank"] // LISTED_RANKS)
    ]
    if len(groups) < 2:
        return manifest
    lists, content = [], b""
    for number, entries in groups:
        line = json.dumps({"files": entries}).encode() + b"\n"
        lists.append(
            {
                "first_rank": number * LISTED_RANKS,
                "num_files": len(entries),
                "files_bytes": sum(entry["size_bytes"] for entry in entries),
                "start_byte": len(content),
                "size_bytes": len(line),
                XXH3: xxhash.xxh3_128_hexdigest(line),
            }
        )
        content += line
    write_atomically(directory / FILES, content)
    entry = {"file": FILES, "size_bytes": len(content), **_checksum(content)}
    files = [each for each in manifest["files"] if "rank" not in each] + [entry]
    return {**manifest, "version": LISTS_VERSION, "files": files, "lists": lists}


def read_list(directory: Path, one: dict[str, Any]) -> list[ListedFile]:
    """Read one list, located by its entry in the manifest, and verify its checksum."""
    path = directory / FILES
    where = f"{path}, {one['size_bytes']} bytes from byte {one['start_byte']}"
    try:
        file = open_regular(path)
        if file is None:
            raise CheckpointError(f"{path}: missing. The checkpoint is damaged.")
        with file:
            file.seek(one["start_byte"])
            line = file.read(one["size_bytes"])
        if (actual := xxhash.xxh3_128_hexdigest(line)) != one[XXH3]:
            raise CheckpointError(f"{where}: XXH3 {actual}, but the manifest says {one[XXH3]}")
        files = parse_record(line, where, _Content)["files"]
    except OSError as error:
        raise CheckpointError(unreadable(path, error, "It is damaged.")) from None
    except RecordError as error:
        raise CheckpointError(error.problems) from None
    if problem := files_problem(files):
        raise CheckpointError(f"{where}: {problem}. It is damaged.")
    return files


def pieces(directory: Path, manifest: dict[str, Any], rank: int, world_size: int) -> list[Piece]:
    """Return the pieces that a rank verifies, as `share` does, but read only the necessary lists.

    Raises:
        CheckpointError: a list is damaged.
    """
    written_by = manifest.get(SHARDS, manifest.get("world_size"))
    lists = manifest.get("lists", [])
    common = [entry for entry in manifest["files"] if not lists or entry["file"] != FILES]
    if not lists:
        return share(common, rank, world_size, written_by)
    if written_by == world_size:
        own = [one for one in lists if one["first_rank"] <= rank][-1:]
        return share([*common, *_entries(directory, own)], rank, world_size, written_by)
    found = share(common, rank, world_size, None)
    for number in range(rank % len(lists), len(lists), world_size):  # several ranks per list, or
        readers = max(1, len(range(number, world_size, len(lists))))  # several lists per rank
        entries = read_list(directory, lists[number])
        found += share(entries, rank // len(lists), readers, None)
    return found


def all_entries(directory: Path, manifest: dict[str, Any]) -> list[ListedFile]:
    """Return the entries of all files, including `FILES.jsonl` itself."""
    return [*manifest["files"], *_entries(directory, manifest.get("lists", []))]


def _entries(directory: Path, lists: Sequence[dict[str, Any]]) -> Iterator[ListedFile]:
    for one in lists:
        yield from read_list(directory, one)


def _checksum(content: bytes) -> dict[str, str]:
    hasher = RangeHash()
    hasher.update(content)
    return {XXH3: hasher.hexdigest()}
