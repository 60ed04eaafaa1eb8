"""`Tracker`: the interface of trackers (W&B, TensorBoard), and how a run finds its trackers.

To add one:

1. Write a subclass of `Tracker` in a new module in this folder.
2. Give it a flag in zerolm/config/settings.py, with `tracker="zerolm.tracking.MODULE:CLASS"`.
3. Describe it in docs/operate.md, and its files in docs/run_directory.md.

No other code refers to a particular tracker. The flag's name is the tracker's name in messages and
the name of its directory in the run directory, which exists before `open` and contains `mirror.log`
and `lock`. The object exists in a separate process, which `Trackers` starts and `Mirror` drives, so
it may block, and may raise any exception. The run imports its module for the class methods, so the
module must not import the tracker's library at the top level.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolm.common.values import shown_setting
from zerolm.config.settings import TRACKERS, Settings
from zerolm.run_dir.files import RunFiles

Row = dict[str, Any]


class Tracker:
    """A copy of a run directory in a tracker. One thread calls all its methods.

    Args:
        of_process: process ID of the run's first rank.

    Attributes:
        package: required Python package, and the zerolm extra that installs it; "" if none.
        state_files: files in the tracker's directory that let a run restored from an object store
            continue the same tracker run.
        where: location of its data, to print on the console.
    """

    package = ""
    state_files: tuple[str, ...] = ()
    where = ""

    def __init__(self, run_dir: Path, of_process: int | None = None):
        self.files, self.of_process = RunFiles(run_dir), of_process
        self.run_dir = self.files.run_dir

    # ---- Called in the run

    @classmethod
    def is_enabled(cls, value: Any) -> bool:
        """Return whether this value of its flag enables the tracker."""
        return bool(value)

    @classmethod
    def problems(cls, name: str, settings: Settings, environment: Mapping[str, str]) -> list[str]:
        """Return why an enabled tracker cannot work on this machine; called before a run starts."""
        if not cls.package or importlib.util.find_spec(cls.package):
            return []
        where = settings.where(name)
        return [
            f"{where}: {shown_setting(where, getattr(settings, name))} needs the package "
            f"{cls.package}. Install it with bash launch/setup.sh {cls.package}, or leave the "
            f"flag out."
        ]

    @classmethod
    def repair(cls, run_dir: Path) -> str:
        """Return how a user can send missing rows after a failure."""
        return "metrics.jsonl is complete, and the next start writes the missing rows"

    # ---- Called in the tracker's process

    def open(self) -> None:
        """Connect, and find which rows the tracker has from earlier starts of the run.

        Retried with growing pauses until it succeeds. Every start of a run passes all rows from the
        first on, so a tracker starts from scratch here, or overrides `lacks`.
        """

    def lacks(self, row: Row) -> bool:
        """Return whether the tracker lacks a row. Called once for each row in the run, in order."""
        return True

    def log(self, row: Row) -> None:
        """Write one line of metrics.jsonl that the tracker lacks."""
        raise NotImplementedError

    def samples(self, rows: list[Row]) -> None:
        """Write lines of samples.jsonl; called before the first row of a later step."""

    def event(self, event: Row) -> None:
        """Write one line of events.jsonl."""

    def flush(self) -> None:
        """Make the written data visible; called when there is currently nothing more to write."""

    def finish(self, exit_code: int) -> None:
        """Write the rest, and close. `exit_code` is 0 if the run finished or was stopped."""


def tracker_class(name: str) -> type[Tracker]:
    """Import and return the class of a tracker."""
    module, _, attribute = TRACKERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def enabled_trackers(settings: Settings) -> list[str]:
    """Return the names of the enabled trackers."""
    return [name for name in TRACKERS if tracker_class(name).is_enabled(getattr(settings, name))]
