"""A recipe over a few documents."""

import json
from pathlib import Path

from data_prep.__main__ import main

TEXTS = [f"Document {n} says that the number {n} is followed by {n + 1}. " * 3 for n in range(40)]


def change(path: Path, **keys) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("shard*"))
        if path.is_file()
    }


def run(recipe: Path) -> None:
    assert main(["run", str(recipe), "--workers", "1"]) == 0


def plan_of(recipe: Path, capsys) -> str:
    """Return what `--check` prints."""
    capsys.readouterr()
    assert main(["run", str(recipe), "--check"]) == 0
    return capsys.readouterr().out
