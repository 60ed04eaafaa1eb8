"""Signatures that a dedup stage keeps so that later documents can be compared with its documents.

For each work unit, `OUTPUT/signatures/` contains the hashes of all documents (`exact`, `bands`),
the ids and shingles of the kept documents (`members`), and which kept document each dropped
document duplicates (`dropped`). `signatures.json` is written last; it lists the files with their
checksums, and the options that later stages must use. The texts are not needed for later
comparisons.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from data_prep.dedup.arrays import (
    DROPPED,
    NUMBER_MASK,
    Units,
    array_path,
    load_array,
    save_array,
    structured_array,
    task_record,
)
from data_prep.dedup.members import find_names, names_path, write_members
from data_prep.read.stage_files import check_listed_files, read_listing
from data_prep.stages.documents import Documents
from zerolm.common.errors import ConfigError
from zerolm.common.files import file_entry, sha256_file, write_atomically, write_json
from zerolm.common.records import Count, RelativePath, with_digest

SIGNATURES = "signatures"  # directory in the stage's output
MANIFEST = "signatures.json"
FORMAT, VERSION = "zerolm-signatures", 1

Json = dict[str, Any]


class _File(TypedDict):
    file: RelativePath
    size_bytes: Count
    sha256: str


class _Named(TypedDict):
    id: str
    name: str


class _Manifest(TypedDict):
    id: str
    name: str
    num_documents: Count
    settings: dict[str, Any]
    against: list[_Named]
    units: list[list[_File]]


@dataclass(frozen=True)
class Signatures:
    """The completed signatures of a stage."""

    directory: Path
    manifest: Json

    @property
    def id(self) -> str:
        """A fingerprint of the documents, the options, and the signatures used for comparison."""
        return self.manifest["id"]

    @property
    def name(self) -> str:
        """The name of the stage, for display."""
        return self.manifest["name"]

    @property
    def num_units(self) -> int:
        """The number of work units."""
        return len(self.manifest["units"])

    def record(self) -> Json:
        """Return the entry that `stage.json` records for these signatures."""
        digest = sha256_file(self.directory / MANIFEST)
        count = self.manifest["num_documents"]
        return {"name": self.name, "id": self.id, "num_documents": count, "sha256": digest}


def open_signatures(arguments: Sequence[str], settings: Mapping[str, Any]) -> list[Signatures]:
    """Open the signatures to compare with, in the given order, and check their file sizes.

    Args:
        arguments: outputs of dedup stages, or their `signatures` directories.
        settings: `comparison_settings` for the new documents; the signatures' settings must be
            equal.
    """
    found: list[Signatures] = []
    problems: list[str] = []
    for argument in arguments:
        try:
            signatures = _read(Path(argument))
        except ConfigError as error:
            problems += error.problems
            continue
        problems += _setting_problems(signatures, settings)
        problems += _chain_problems(signatures, found, argument)
        found.append(signatures)
    if problems:
        raise ConfigError(problems)
    return found


def _read(argument: Path) -> Signatures:
    nested = (argument / SIGNATURES / MANIFEST).is_file()
    directory = argument / SIGNATURES if nested else argument
    path = directory / MANIFEST
    fix = "Write them with `dedup --keep_signatures on`."
    if not path.is_file():
        raise ConfigError(f"{argument}: has no signatures ({MANIFEST} is missing). {fix}")
    manifest = read_listing(path, _Manifest, (FORMAT, VERSION), fix)
    check_listed_files(path, chain.from_iterable(manifest["units"]), fix)
    return Signatures(directory, manifest)


def _setting_problems(signatures: Signatures, settings: Mapping[str, Any]) -> list[str]:
    """Return a problem for each setting that differs from the new documents' settings."""
    path, kept = signatures.directory / MANIFEST, signatures.manifest["settings"]
    problems = []
    for key in sorted({*settings, *kept}):
        ours, theirs = settings.get(key), kept.get(key)
        if ours == theirs:
            continue
        if key in ("algorithm", "minhash", "unicode"):
            where, fix = "in this environment", "Use the environment that wrote them"
        else:
            where, fix = "for the new documents", f"Use {key} {theirs!r} for them too"
        problems.append(
            f"{path}: {key} is {theirs!r}, but {ours!r} {where}. {fix}, or write the signatures "
            "again with `dedup --keep_signatures on`."
        )
    return problems


def _chain_problems(signatures: Signatures, before: Sequence[Signatures], given: str) -> list[str]:
    """Return a problem if signatures were given twice, or before others that they depend on."""
    ids = [each.id for each in before]
    if signatures.id in ids:
        return [f"{given}: these signatures were already given. Name them once."]
    missing = [each["name"] for each in signatures.manifest["against"] if each["id"] not in ids]
    if not missing:
        return []
    return [
        f"{given}: its documents were compared with those of {', '.join(missing)}. Give the "
        "signatures of those stages before it."
    ]


def unrelated(signatures: Sequence[Signatures]) -> list[tuple[str, str]]:
    """Return the names of all pairs of signatures whose documents were never compared."""
    found = []
    for number, later in enumerate(signatures):
        compared = {each["id"] for each in later.manifest["against"]}
        found += [
            (each.name, later.name) for each in signatures[:number] if each.id not in compared
        ]
    return found


@dataclass(frozen=True)
class CheckTask:
    """Verifies the checksums of all files that belong to one unit of kept signatures."""

    old: tuple[tuple[Path, int], ...]
    directory: Path  # of the phase

    def __call__(self, unit: int) -> Json:
        units = [(path, number) for path, count in self.old for number in range(count)]
        directory, number = units[unit]
        manifest = directory / MANIFEST
        for entry in _units(manifest, manifest.stat().st_mtime_ns)[number]:
            path = directory / entry["file"]
            if sha256_file(path) != entry["sha256"]:
                raise ConfigError(
                    f"{path}: its SHA-256 differs from {MANIFEST}. It is damaged: restore it from "
                    f"a copy, or write the signatures again with `dedup --keep_signatures on`."
                )
        return task_record(self.directory, {})


@lru_cache(maxsize=4)
def _units(manifest: Path, modified_ns: int) -> list[list[_File]]:
    return json.loads(manifest.read_bytes())["units"]


@dataclass(frozen=True)
class KeepTask:
    """Completes a unit's signatures after `DecideTask` has decided which documents to drop.

    Args:
        stores: names of the signatures in `units.old`.
    """

    documents: Documents
    units: Units
    stores: tuple[str, ...]
    directory: Path
    shingle_words: int
    near: bool

    def __call__(self, task: int) -> Json:
        decisions = self.units.decisions(task)
        numbers = decisions["dropped"] & NUMBER_MASK
        total = len(load_array(array_path(self.units.hashes, "exact", task)))
        kept = np.setdiff1d(np.arange(total, dtype=np.uint64), numbers)
        members = array_path(self.units.hashes, "members", task)
        paired = kept if self.near else kept[:0]
        sizes = write_members(self.documents, task, members, kept, paired, self.shingle_words)
        path = array_path(self.units.hashes, "dropped", task)
        rows = structured_array(DROPPED, numbers, decisions["similarity"])
        sizes[path] = save_array(path, rows)
        names = find_names(self.units, self.stores, decisions["kept"])
        write_atomically(names_path(path), json.dumps(names).encode(), many_writers=True)
        sizes[names_path(path)] = names_path(path).stat().st_size
        for kind in ("exact", "bands") if self.near else ("exact",):
            path = array_path(self.units.hashes, kind, task)
            sizes[path] = path.stat().st_size
        entries = [file_entry(path, self.units.hashes) for path in sizes]
        return {**task_record(self.directory, sizes), "entries": entries, "num_documents": total}


def publish_signatures(
    output: Path,
    key: str,
    settings: Mapping[str, Any],
    against: Sequence[Signatures],
    records: Sequence[Json],
) -> Json:
    """Write `signatures.json`, and return the counts that `stage.json` records.

    Args:
        records: results of the `KeepTask` calls.
    """
    directory = output / SIGNATURES
    units = [record["entries"] for record in records]
    listed = {entry["file"] for unit in units for entry in unit}
    for path in directory.rglob("*"):  # left by a run with other options
        if path.is_file() and path.relative_to(directory).as_posix() not in listed:
            path.unlink(missing_ok=True)
    totals = {
        "num_documents": sum(record["num_documents"] for record in records),
        "size_bytes": sum(entry["size_bytes"] for unit in units for entry in unit),
    }
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "id": key,
        "name": "/".join(output.absolute().parts[-2:]),
        **totals,
        "settings": settings,
        "against": [{"id": each.id, "name": each.name} for each in against],
        "units": units,
    }
    write_json(directory / MANIFEST, with_digest(manifest))
    return totals


def withdraw_signatures(output: Path, keep: bool) -> None:
    """Invalidate the signatures of an earlier run of the stage, and delete them unless `keep` is
    set.
    """
    signatures_manifest(output).unlink(missing_ok=True)
    if not keep:
        shutil.rmtree(output / SIGNATURES, ignore_errors=True)


def signatures_manifest(output: Path) -> Path:
    """Return the path of the file whose presence marks a stage's signatures as complete."""
    return output / SIGNATURES / MANIFEST
