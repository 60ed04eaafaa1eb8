"""Recognises directories whose files are not documents one by one: tables, arrays, caches, stages.

A table format lists in its log which of its files, and which of their rows, are still in the table:
the others lie beside them. Recognised by names, so local paths and stores have the same rules.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data_prep.files.remote import list_directory
from data_prep.read.stage_files import is_unfinished
from zerolm.common.url import is_url

Names = Collection[str]


class Format(NamedTuple):
    """A format of directories."""

    kind: str  # "a Delta table"
    finds: Callable[[str, Names, Names], bool]  # of a directory: its name, directories and files
    fix: str
    is_inside: bool = False  # whether what is recognised is a directory in that of the format


def _any(pattern: str, names: Iterable[str]) -> bool:
    return any(map(re.compile(pattern).fullmatch, names))


ROWS = "Parquet or JSON lines with {}, and give those"
TABLE = "some of its files or rows are replaced or deleted. Write its current rows as " + ROWS
OTHER = "its files are not documents. Write its rows as " + ROWS
SHARDS = (
    "its files are not documents. If it has token ids, use: zerolm data convert --from {}. "
    "Otherwise write its texts as JSON lines"
)
ACID = r"((delete_)?delta_\d{7}_\d{7}(_\d{4})?|base_\d{7})(_v\d+)?"
ICEBERG = r"version-hint\.text|(v\d+|\d{5}-[0-9a-f-]{36})(\.gz)?\.metadata\.json(\.gz)?"
ZARR = r"\.zarray|\.zgroup|zarr\.json"
TABLES = (
    Format("a Delta table", lambda name, ds, fs: "_delta_log" in ds, TABLE.format("deltalake")),
    Format(
        "a Hudi table",
        lambda name, ds, fs: ".hoodie" in ds or ".hoodie_partition_metadata" in fs,
        TABLE.format("Spark or hudi"),
    ),
    Format(
        "an Iceberg table",
        lambda name, ds, fs: name == "metadata" and _any(ICEBERG, fs),
        TABLE.format("pyiceberg"),
        is_inside=True,
    ),
    Format(
        "a Paimon table",
        lambda name, ds, fs: name == "schema" and _any(r"schema-\d+", fs),
        TABLE.format("pypaimon"),
        is_inside=True,
    ),
    Format("a transactional Hive table", lambda name, ds, fs: _any(ACID, ds), TABLE.format("Hive")),
    Format(
        "a DuckLake table",
        lambda name, ds, fs: _any(r"ducklake-[0-9a-f-]{36}.*\.parquet", fs),
        TABLE.format("duckdb"),
    ),
    Format(
        "the output of a Spark stream",
        lambda name, ds, fs: "_spark_metadata" in ds,
        TABLE.format("Spark"),
    ),
)
FORMATS = (
    *TABLES,
    Format(
        "a Lance dataset",
        lambda name, ds, fs: {"_versions", "data"} <= {*ds} or _any(r".+\.lance", [name, *fs]),
        TABLE.format("pylance"),
    ),
    Format(
        "a Vortex dataset",
        lambda name, ds, fs: _any(r".+\.(vortex|vtx)", fs),
        OTHER.format("vortex-data"),
    ),
    Format("a zarr store", lambda name, ds, fs: _any(ZARR, fs), OTHER.format("zarr")),
    Format(
        "a TensorFlow dataset",
        lambda name, ds, fs: {"dataset_info.json", "features.json"} <= {*fs},
        OTHER.format("tensorflow-datasets"),
    ),
    Format(
        "a litdata dataset",
        lambda name, ds, fs: _any(r"chunk-\d+-\d+(\..+)?\.bin", fs),
        SHARDS.format("litdata"),
    ),
    Format(
        "a dataset of Mosaic's streaming",
        lambda name, ds, fs: _any(r".+\.mds(\..+)?", fs),
        SHARDS.format("mds"),
    ),
    Format(
        "a hub cache of several revisions",
        lambda name, ds, fs: name == "snapshots" and sum(_any("[0-9a-f]{40}", [d]) for d in ds) > 1,
        "most of its rows are in each of them. Give the directory of one",
    ),
)


class Found(NamedTuple):
    """A directory of a format."""

    format: Format
    directory: str


def find_format(
    directory: str, directories: Names, files: Names, formats: Sequence[Format] = FORMATS
) -> Found | None:
    """Return the format of a directory with these contents, or None."""
    path = directory if is_url(directory) else os.path.abspath(directory)  # noqa: PTH100 - as given
    parent, _, name = path.rstrip("/").rpartition("/")
    for each in formats:
        if each.finds(name, directories, files):
            return Found(each, parent if each.is_inside else directory)
    return None


def find_in_listing(top: str, names: Iterable[str]) -> Iterator[Found]:
    """Yield the formats of all directories of a store below `top`, which has files `names`."""
    contents: dict[str, tuple[set[str], set[str]]] = {}
    for name in names:
        directory, _, file = name.rpartition("/")
        contents.setdefault(directory, (set(), set()))[1].add(file)
        while directory.startswith(top.rstrip("/") + "/"):
            directory, _, child = directory.rpartition("/")
            contents.setdefault(directory, (set(), set()))[0].add(child)
    found = (find_format(each, *inside) for each, inside in sorted(contents.items()))
    return (each for each in found if each is not None)


def find_tables_of(directories: Iterable[str]) -> Iterator[Found]:
    """Yield the tables to which directories belong as partitions, as `data`, or themselves."""
    candidates: set[str] = set()
    for directory in directories:
        path = directory if is_url(directory) else os.path.abspath(directory)  # noqa: PTH100
        above, _, name = path.rpartition("/")
        while "=" in name or name.startswith("bucket-"):
            candidates.add(path)
            path, (above, _, name) = above, above.rpartition("/")
        candidates |= {path, above} if name == "data" else {path}
    for candidate in sorted(candidates):
        children, names = list_directory(candidate)
        inside = [name for name in ("metadata", "schema") if name in children]
        listed = [(candidate, children, names)]
        listed += [
            (f"{candidate}/{name}", *list_directory(f"{candidate}/{name}")) for name in inside
        ]
        found = (find_format(*each, formats=TABLES) for each in listed)
        yield from (each for each in found if each is not None)


def find_caches(files: Iterable[str]) -> Iterator[str]:
    """Yield a problem for each directory of which several files have the same rows: the results of
    `map` and `filter` that `datasets` keeps beside a dataset, and caches of several splits.
    """
    arrow: dict[str, list[str]] = {}
    for file in files:
        if file.endswith(".arrow"):
            arrow.setdefault(file.rpartition("/")[0], []).append(file.rpartition("/")[2])
    for directory, names in arrow.items():
        caches = [name for name in names if re.fullmatch(r"cache-.+\.arrow", name)]
        parts = [re.sub(r"(-\d{5}-of-\d{5})?\.arrow$", "", name) for name in names]
        splits = {part.rpartition("-")[2] for part in parts if "-" in part}
        info = not is_url(directory) and Path(directory, "dataset_info.json").exists()
        if caches and len(names) > 1:
            fact = f"has {len(caches):,} results of map or filter, such as {min(caches)}"
        elif info and len(splits) > 1 and not Path(directory, "state.json").exists():
            fact = f"has {len(splits)} splits: {', '.join(sorted(splits))}"
        else:
            continue
        yield (
            f"{directory} is a cache of the library datasets, which {fact}. Give the files of one "
            f"of them, or a directory that Dataset.save_to_disk writes."
        )


def describe(found: Iterable[Found]) -> list[str]:
    """Return a problem for each format."""
    by_format: dict[str, list[Found]] = {}
    for each in sorted(set(found), key=lambda each: each.directory):
        by_format.setdefault(each.format.kind, []).append(each)
    return [
        f"{first.directory} is {kind}"
        + (f" (and {len(more):,} more are)" if more else "")
        + f": {first.format.fix}."
        for kind, (first, *more) in by_format.items()
    ]


def directory_problem(directory: str, directories: list[str], names: list[str]) -> str | None:
    """Return why the files below a directory of ours or of `datasets` cannot be read, or None."""
    if {"records", "work"} & set(directories) and is_unfinished(directory):
        return (
            f"{directory} is an unfinished stage. Run its command again to finish it, or remove it."
        )
    if "dataset_dict.json" in names and len(directories) > 1:
        return (
            f"{directory} is a DatasetDict with {len(directories)} splits. Give the directory of "
            f"one: {directory}/{min(directories)}"
        )
    return None


def without_caches(directory: str, names: list[str]) -> list[str]:
    """Return the files in a directory; omit a saved `Dataset`'s cached results of `map`."""
    try:
        content = json.loads(Path(directory, "state.json").read_text(encoding="utf-8"))
        listed = {each["filename"] for each in content["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return names
    return [name for name in names if name in listed or not name.endswith(".arrow")]
