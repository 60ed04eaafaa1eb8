"""What a pipeline has begun, in its directories, and the lock that keeps a second run out."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerolm.errors import ConfigError, ZerolmError
from zerolm.files import write_json

STATE = "pipeline.json"  # of a source, or of all: what each of its stages was begun with
LOCK = ".lock"


def read_state(directory: Path) -> dict[str, str]:
    """Return the fingerprints that stages were begun with, by their names."""
    try:
        return json.loads((directory / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def write_state(directory: Path, begun: dict[str, str]) -> None:

    make_directory(directory)
    write_json(directory / STATE, begun)


def make_directory(directory: Path) -> None:
    """Make a directory. Raises ConfigError where that cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made ({error.strerror}).") from error


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep a second run of the same pipeline out."""
    with open(output / LOCK, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ZerolmError(
                f"{output}: another run is at work there. Wait for it, or choose another output."
            ) from error
        yield
