"""`HtmlReport`: update `report.html` in the background, at intervals and at the end of a run.

A separate process, `python -m zerolm report RUN_DIR`, writes each report, so slow or failing
reports do not affect training. Only one process runs at a time. A supervisor calls `start_for`
after a failed attempt.
"""

import os
import time
from functools import partial
from pathlib import Path
from shlex import quote

from zerolm.common.child import Child
from zerolm.common.errors import RecordError
from zerolm.distributed.collectives import print_safely
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.records import find_run_json
from zerolm.watchdog.progress import record_progress

FIRST_SECONDS = 30.0  # time from the start of a run to its first report
# At its end, a run waits for its report for FINISH_FACTOR times the duration of the last report,
# within these limits. A million lines take a minute.
FINISH_SECONDS, MAX_FINISH_SECONDS = 20.0, 180.0
FINISH_FACTOR = 3.0
MAX_BUSY_SHARE = 0.05  # maximum share of time spent on reports: slow reports are less frequent


class HtmlReport:
    """Keeps a run's HTML report up to date. Only `finish` blocks.

    Args:
        interval: seconds between two reports; 0 makes every method a no-op.
        active: whether this is the first rank; False makes every method a no-op.
    """

    def __init__(self, run_dir: Path, interval: float, active: bool):
        self.run_dir, self.interval = Path(run_dir), interval
        self.active = active and interval > 0
        self._child = Child("report", run_dir)
        self._started = time.monotonic()
        self._write_at = self._started + min(interval, FIRST_SECONDS)
        self._warned = False
        self._last_seconds = 0.0  # duration of the last report

    def tick(self) -> None:
        """Start a report process if a report is due and none is running. Takes microseconds."""
        if not self.active:
            return
        if self._child.running:
            self._check(self._child.poll())
        elif time.monotonic() >= self._write_at:
            self._start()

    def finish(self) -> None:
        """Write the final report of a run, and wait for a limited time until it is written."""
        if not self.active:
            return
        seconds = min(max(FINISH_SECONDS, FINISH_FACTOR * self._last_seconds), MAX_FINISH_SECONDS)
        deadline = time.monotonic() + seconds
        self._end(deadline)  # a report in progress does not include the end of the run
        self._start()
        self._end(deadline)

    def _start(self) -> None:
        self._started = time.monotonic()
        self._write_at = self._started + self.interval
        try:
            self._child.start()
        except OSError as error:
            self._warn(str(error))

    def _check(self, code: int | None) -> None:
        """Schedule the next report if the process has exited.

        Args:
            code: the process's exit code; None if it is still running.
        """
        if code is None:
            return
        now = time.monotonic()
        seconds = now - self._started
        self._write_at = max(self._write_at, now + min(seconds, 600.0) / MAX_BUSY_SHARE)
        if code == 0:
            self._last_seconds = seconds
        else:
            self._warn(f"exit code {code}")

    def _end(self, deadline: float) -> None:
        self._check(self._child.wait(deadline, waiting=partial(record_progress, "end")))
        if self._child.running:
            self._child.kill()
            self._warn("its process did not end in time")

    def _warn(self, reason: str) -> None:
        if not self._warned:
            print_safely(
                f"report: {RunFiles(self.run_dir).report} was not updated: {reason}. To write it: "
                f"zerolm report {quote(str(self.run_dir))}"
            )
        self._warned = True


def start_for(run_dir: Path) -> Child | None:
    """Start a process that writes the report for a run whose own processes have exited.

    The process is killed when this process exits. Return None if reports are disabled for the run,
    the run never started, or the process cannot be started.
    """
    try:
        record = find_run_json(run_dir)
        if record and record.get("settings", {}).get("report_interval"):
            child = Child("report", run_dir, log=Path(os.devnull))
            child.start()
            return child
    except (OSError, RecordError):
        pass
    return None
