"""`Tracker`: the interface of trackers (W&B, TensorBoard), and how a run finds its trackers.

To add one:

1. Write a subclass of `Tracker` in a new module in this folder.
2. Give it a flag in zerolm/config/settings.py, with `tracker="zerolm.tracking.MODULE:CLASS"`.
3. Describe it in docs/operate.md, and its files in docs/run_directory.md.

No other code refers to a particular tracker. The flag's name is used as the tracker's name in
messages and as the name of its directory in the run directory. This directory exists before `open`,
and contains `mirror.log` and `lock`. The tracker object is created in a separate process, which
`Trackers` starts and `Mirror` drives, so its methods may block and raise any exception. The run
imports the module for the class methods, so the module must not import the tracker's library at the
top level.
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
        state_files: files in the tracker's directory with which a run that is restored from an
            object store can continue the same tracker run.
        where: location of the tracker's data, to print on the console.
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
        """Return whether a value of the tracker's flag enables the tracker."""
        return bool(value)

    @classmethod
    def problems(cls, name: str, settings: Settings, environment: Mapping[str, str]) -> list[str]:
        """Return the problems that prevent an enabled tracker from working on this machine.

        Called before a run starts.
        """
        if not cls.package or importlib.util.find_spec(cls.package):
            return []
        where = settings.where(name)
        return [
            f"{where}: {shown_setting(where, getattr(settings, name))} needs the package "
            f"{cls.package}. Install it with bash launch/setup.sh {cls.package}, or leave the "
            f"flag out."
        ]

    @classmethod
    def resolve(cls, settings: Settings, environment: Mapping[str, str]) -> Settings:
        """Return the settings with the tracker's own variables applied; called for every run."""
        return settings

    @classmethod
    def value_problems(cls, settings: Settings, environment: Mapping[str, str]) -> list[str]:
        """Return the settings and variables that an enabled tracker refuses on any machine."""
        return []

    @classmethod
    def notices(cls, settings: Settings, environment: Mapping[str, str]) -> list[str]:
        """Return what a user may not expect of an enabled tracker."""
        return []

    @classmethod
    def repair(cls, run_dir: Path) -> str:
        """Return how a user can send missing rows after a failure."""
        return "metrics.jsonl is complete, and the next start writes the missing rows"

    # ---- Called in the tracker's process

    def open(self) -> None:
        """Connect, and determine which rows the tracker has from earlier starts of the run.

        This is retried with growing pauses until it succeeds. Every start of a run passes all rows,
        beginning with the first, so a tracker must either start from scratch or override `lacks`.
        """

    def lacks(self, row: Row) -> bool:
        """Return whether a row is missing in the tracker. Called once for each row, in order."""
        return True

    def log(self, row: Row) -> None:
        """Write one line of metrics.jsonl that is missing in the tracker."""
        raise NotImplementedError

    def samples(self, rows: list[Row]) -> None:
        """Write lines of samples.jsonl; called before the first row of a later step."""

    def event(self, event: Row) -> None:
        """Write one line of events.jsonl."""

    def flush(self) -> None:
        """Make the written data visible; called when there is nothing more to write at the time."""

    def finish(self, exit_code: int) -> None:
        """Write all remaining data, and close the tracker.

        Args:
            exit_code: 0 if the run is done, stopped or rolled back, otherwise 1.
        """


def tracker_class(name: str) -> type[Tracker]:
    """Import and return the class of a tracker."""
    module, _, attribute = TRACKERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def resolve_trackers(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """Return the settings with the variables of all trackers applied."""
    for name in TRACKERS:
        settings = tracker_class(name).resolve(settings, environment)
    return settings


def enabled_trackers(settings: Settings) -> list[str]:
    """Return the names of the enabled trackers."""
    return [name for name in TRACKERS if tracker_class(name).is_enabled(getattr(settings, name))]
