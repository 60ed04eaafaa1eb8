"""The run's part in `report.html`: start the process that writes it, now and then and at the end.

The first rank starts `python -m zerolm report RUN_DIR` with the lowest priority (zerolm/report.py),
one at a time. All that can be slow or broken is over there; nothing of it ends a run. A supervisor
has it written after a failed attempt.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from zerolm import processes, pulse
from zerolm.distributed import tell

FIRST_SECONDS = 30.0  # after the start, so that there is a page to look at soon
# The end of a run waits so long for its page, or for three times what the last one took, up to the
# second: that of a run of a million lines takes a minute.
FINISH_SECONDS, MOST_FINISH_SECONDS = 20.0, 180.0
BUSY_SHARE = 20.0  # a page that took a second is not written again for so many


class Reporting:
    """Keeps the page of a run as new as `interval` says. No call waits, but `finish`.

    Args:
        interval: seconds between two pages; 0 makes every method a no-op, as `active` False does.
        active: on the first rank only.
    """

    def __init__(self, run_dir: Path, interval: float, active: bool):
        self.run_dir, self.interval = Path(run_dir), interval
        self.active = active and interval > 0
        self._child: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()
        self._write_at = self._began + min(interval, FIRST_SECONDS)
        self._warned = False
        self._took = 0.0  # seconds, for the last page

    def poke(self) -> None:
        """Start a process if the page is old and none is at it. Takes microseconds."""
        if not self.active or time.monotonic() < self._write_at:
            return
        self._write_at = time.monotonic() + self.interval
        if self._child is not None and self._child.poll() is None:
            return
        self._reap()
        self._start()

    def finish(self) -> None:
        """Write the page of the end of a run, and wait for it a little."""
        if not self.active:
            return
        seconds = min(max(FINISH_SECONDS, 3 * self._took), MOST_FINISH_SECONDS)
        deadline = time.monotonic() + seconds
        for again in (True, False):  # what is being written now lacks the end
            if self._child is not None:
                while self._child.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                    pulse.beat("end")  # to wait here is not to hang
                if self._child.poll() is None:
                    self._child.kill()
                    self._child.wait()
                self._reap()
            if again:
                self._start()

    def _start(self) -> None:
        self._began = time.monotonic()
        try:
            serving = ["--of_process", str(os.getpid())]
            self._child = subprocess.Popen(
                [*_command(self.run_dir), *serving],
                env=processes.observer_environment(),
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:  # no memory for a process: training goes on
            self._warn(str(error))

    def _reap(self) -> None:
        """Take note of a process that has ended."""
        if self._child is None:
            return
        seconds = time.monotonic() - self._began
        self._write_at = max(self._write_at, time.monotonic() + BUSY_SHARE * min(seconds, 600.0))
        if self._child.returncode == 0:
            self._took = seconds
        else:
            self._warn(f"exit code {self._child.returncode}")
        self._child = None

    def _warn(self, why: str) -> None:
        if not self._warned:
            tell(
                f"report: {self.run_dir}/report.html was not written anew: {why}. By hand: "
                f"python -m zerolm report {self.run_dir}"
            )
        self._warned = True


def begin_for(run_dir: Path) -> "subprocess.Popen[bytes] | None":
    """Begin to write the page of a run that was killed, for whoever sees to the run.

    The process is of low priority, and ends with the one that has called.

    Returns:
        The process; None if the run was to have no page, or never began.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((Path(run_dir) / "run.json").read_text())
        if record["settings"]["report_interval"]:
            return subprocess.Popen(
                [*_command(run_dir), "--of_process", str(os.getpid())],
                env=processes.observer_environment(),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    return None


def _command(run_dir: Path) -> list[str]:
    return [sys.executable, "-m", "zerolm", "report", str(run_dir)]
