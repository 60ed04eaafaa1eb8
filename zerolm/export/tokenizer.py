"""Finds a run's tokenizer, which is that of the first data source in run.json, and the generation
config of its initial weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolm.common.url import is_url
from zerolm.config.settings import split_weight
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.records import find_run_json
from zerolm.shards.manifest import MANIFEST
from zerolm.shards.reader import Source, open_source


def tokenizer_of(run_dir: Path) -> tuple[Path | None, int | None]:
    """Return the tokenizer's directory and EOS id, or None for both if the shards are not found.

    Raises:
        ConfigError: the shards or their tokenizer are damaged.
    """
    source = first_source(run_dir)
    return (None, None) if source is None else (source.tokenizer_directory(), source.eos_id)


def generation_of(run_dir: Path) -> Mapping[str, Any] | None:
    """Return the generation config of a run's initial weights, or None if they were random."""
    initial = (find_run_json(run_dir) or {}).get("initial_weights")
    return None if initial is None else initial.get("generation", {})


def first_source(run_dir: Path) -> Source | None:
    """Return a run's first data source, or None if its shards are not found."""
    found = [path for path in _places(run_dir) if is_url(path) or Path(path, MANIFEST).is_file()]
    return open_source(found[0]) if found else None


def missing_tokenizer(run_dir: Path) -> str:
    """Return why `tokenizer_of` found no tokenizer, including the paths searched for the shards."""
    path = RunFiles(run_dir).record
    if (source := first_source(run_dir)) is not None:
        return f"{path}: settings.data: {source.directory} has no tokenizer"
    places = " or ".join(_places(run_dir))
    return f"{path}: settings.data: {f'no {MANIFEST} in {places}' if places else 'is missing'}"


def _places(run_dir: Path) -> list[str]:
    """Return the possible locations of the first source's shards, the likeliest first.

    A relative path is resolved against the directory in which the run was started, or, if both
    were moved, against the one below which `run_dir` was created. Early releases did not record
    the starting directory, and it cannot be derived from an absolute `--run_dir`: then the path is
    resolved against the current directory.
    """
    record = find_run_json(run_dir) or {}
    settings = record.get("settings", {})
    if not settings.get("data"):
        return []
    try:
        data, _ = split_weight(settings["data"][0])
    except ValueError:
        data = settings["data"][0]
    if is_url(data) or Path(data).is_absolute():
        return [data]
    bases = [Path(each) for each in [record.get("working_directory")] if each]
    parts, given = Path(run_dir).resolve().parts, Path(settings.get("run_dir") or "/")
    if not given.is_absolute() and parts[-len(given.parts) :] == given.parts:
        bases.append(Path(*parts[: -len(given.parts)]))
    return [str(base / data) for base in dict.fromkeys(bases or [Path.cwd()])]
