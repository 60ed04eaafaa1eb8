"""State of a pipeline on disk: the stages started so far, and a lock against a second run."""

from pathlib import Path

from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.common.files import write_json
from zerolm.common.locks import FileLock, LockTaken
from zerolm.common.records import read_record

STATE_FILE = "pipeline.json"  # fingerprints of a source's or the pipeline's started stages
LOCK_FILE = ".lock"


def read_state(directory: Path) -> dict[str, str]:
    """Return the fingerprint with which each stage was started."""
    fix = "Restore it, or remove it to run all stages in this directory again."
    return read_record(directory / STATE_FILE, dict[str, str], fix) or {}


def write_state(directory: Path, started: dict[str, str]) -> None:
    """Write the fingerprints of started stages."""
    make_directory(directory)
    write_json(directory / STATE_FILE, started)


def make_directory(directory: Path) -> None:
    """Create a directory and its parents."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be created ({error.strerror}).") from error


def lock_output(output: Path) -> FileLock:
    """Lock a pipeline's output."""
    try:
        return FileLock(output / LOCK_FILE)
    except LockTaken as error:
        raise ZerolmError(
            f"{output}: another run is using this output. Wait until it has finished, or choose "
            "another output."
        ) from error
