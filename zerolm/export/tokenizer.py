"""Finds a run's tokenizer, that of its first data source in run.json, and the generation values of
the weights that the run began with.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolm.common.url import is_url
from zerolm.config.run_records import find_run_json
from zerolm.shards.reader import Source, open_source


def tokenizer_of(run_dir: Path) -> tuple[Path | None, int | None]:
    """Return the tokenizer's directory and its EOS id; None if the shards have been removed.

    Raises:
        ConfigError: the shards or their tokenizer are damaged.
    """
    source = first_source(run_dir)
    return (None, None) if source is None else (source.tokenizer_directory(), source.eos_id)


def generation_of(run_dir: Path) -> Mapping[str, Any] | None:
    """Return the values of generation of the weights that a run began with; None if random."""
    initial = (find_run_json(run_dir) or {}).get("initial_weights")
    return None if initial is None else initial.get("generation", {})


def first_source(run_dir: Path) -> Source | None:
    """Return the first data source of a run; None if its shards have been removed."""
    recorded = (find_run_json(run_dir) or {}).get("settings", {}).get("data")
    if not recorded:
        return None
    data = recorded[0].rsplit("=", 1)[0]
    if not is_url(data) and not (Path(data) / "manifest.json").is_file():
        return None
    return open_source(data)
