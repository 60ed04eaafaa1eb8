"""Start a run, and restart it after failures until it is done.

pretrain.py resumes automatically, so a restart repeats the same command. Before each restart, the
supervisor checks what an operator would check: whether the run always fails in the same step,
whether it makes any progress, and whether its hosts work. After a stop request, which is forwarded
to the ranks, the run is not restarted.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.command.deepspeed_command import run_directory
from launch.supervise import slurm
from launch.supervise.attempt import POLL_SECONDS, Attempt, left_behind
from launch.supervise.config_files import ConfigFiles
from launch.supervise.hosts import (
    HostCheck,
    TooFewHostsError,
    default_check,
    without_failing_hosts,
)
from launch.supervise.imports import Imports
from launch.supervise.outcome import Outcome
from launch.supervise.restarts import Policy, Restarts
from zerolm.checkpoint import memory
from zerolm.common import processes
from zerolm.common.child import Child
from zerolm.common.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_GAVE_UP,
    EXIT_REFUSED,
    EXIT_STOPPED,
    ConfigError,
    RecordError,
    ShardError,
)
from zerolm.common.locks import FileLock, LockTaken
from zerolm.common.secrets import masked
from zerolm.run_dir import events
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.records import find_run_json
from zerolm.tracking import report_process
from zerolm.watchdog import limits

IN_USE = "another run is writing to it now"  # part of a message in zerolm/train/run_directory.py
EARLIER_RUN_SECONDS = 1800.0  # time for ranks left behind by a killed supervisor to save
FINAL = {
    EXIT_DONE: "done",
    EXIT_STOPPED: "stopped on request; run the same command again to resume",
    EXIT_GAVE_UP: "gave up",
    EXIT_REFUSED: "refused",
}


class StopRequested(Exception):
    """A signal or the deadline arrived while no launch was running."""


class Supervisor:
    """Runs a command until its run is done."""

    def __init__(self, command: Sequence[str], policy: Policy):
        self.command, self.policy = list(command), policy
        self.run_dir = run_directory(self.command)
        self.restarts = Restarts(policy, self.run_dir)
        self.identity = secrets.token_hex(8)
        self.attempts, self.imports = 0, Imports()
        self.unwanted_hosts: dict[str, str] = {}  # {host: why}
        self.left: dict[str, str] = {}  # {host: shell command that kills leftover processes}
        self.signals: list[int] = []
        self.stop_reason: str | None = None
        self.html_report: Child | None = None  # process that writes the HTML report after a failure
        self.signals_before_report = 0
        self.started = time.monotonic()
        self.keeps_failing = False
        self.created_run_dir = not self.run_dir.exists()
        self.lock = _lock_run_directory(self.run_dir)
        self.configs = ConfigFiles(self.command, self.run_dir, self.log)

    def run(self) -> int:
        """Supervise the run until it ends; return its exit code."""
        for number in processes.stop_signals():
            signal.signal(number, lambda number, frame: self.signals.append(number))
        code, may_run_later = EXIT_BUG, False
        try:
            code = self._run()
            may_run_later = code == EXIT_STOPPED
        except StopRequested:
            self.log(f"stopped on request ({self.stop_reason}): nothing was running")
            code, may_run_later = EXIT_STOPPED, True
        except ConfigError as error:
            self.log(str(error))
            code, may_run_later = error.exit_code, isinstance(error, TooFewHostsError)
        finally:
            seconds = report_process.FINISH_SECONDS if code == EXIT_BUG else 0.0
            self._guarded("finish the HTML report", self._end_report, seconds)
            self._guarded("end its imports", self.imports.close)
            self._guarded("release its lock", self.lock.release)
            if code in (EXIT_DONE, EXIT_GAVE_UP) or self.keeps_failing:
                self._guarded("remove copies in memory", memory.remove_copies, self.run_dir)
            if self.created_run_dir:
                self._guarded("remove the unused run directory", self._remove_unused_run_dir)
        may_run_later &= self.policy.requeue and self.stop_reason != "SIGINT"
        if may_run_later and self._guarded("requeue the job", slurm.requeue, self.log):
            return EXIT_STOPPED
        return code

    def _run(self) -> int:
        policy = self.policy
        self._wait_for_an_earlier_run()
        while True:
            self.attempts += 1
            try:
                command = without_failing_hosts(
                    self.configs.pinned(self.command),
                    self.run_dir,
                    policy.min_hosts,
                    HostCheck(policy.host_check or default_check(), policy.host_check_timeout),
                    self.log,
                    self.unwanted_hosts,
                    self.left,
                )
                attempt = self._start(command)
            except OSError as error:  # such as no space for the hostfile, or a failed fork
                outcome = Outcome(EXIT_BUG, reasons=[f"cannot start the run: {error}"])
            except ConfigError as error:  # such as too few hosts that pass the check
                if policy.requeue or not self.restarts.has_trained:
                    raise
                outcome = Outcome(EXIT_REFUSED, reasons=error.problems)
            else:
                outcome = self._watch(attempt)
            if outcome.exit_code in FINAL and not self._is_refused_for_now(outcome):
                self.log(f"{FINAL[outcome.exit_code]}: exit code {outcome.exit_code}")
                for reason in outcome.reasons:
                    self.log(f"  {reason}")
                return outcome.exit_code
            self._log_failure(outcome)
            self._note_unwanted_hosts(outcome)
            if self.stop_reason is not None:
                self.log(
                    f"stop requested ({self.stop_reason}), but the run failed before it had saved; "
                    f"{self.restarts.shown_checkpoint()}"
                )
                return EXIT_BUG
            diagnosis = self.restarts.add_failure(outcome)
            if diagnosis is not None:
                self.keeps_failing = True
                self.log(diagnosis)
                self._event("supervisor_stopped", outcome, reason=diagnosis)
                return EXIT_REFUSED if outcome.exit_code == EXIT_REFUSED else EXIT_BUG
            self._wait(self.restarts.pause_seconds())
            self.restarts.count += 1

    def _note_unwanted_hosts(self, outcome: Outcome) -> None:
        if self.policy.leave_out_slow_hosts:
            slow = dict.fromkeys(outcome.slow_hosts, "it was slower than the others")
            self.unwanted_hosts |= slow
        corrupt = dict.fromkeys(outcome.corrupt_hosts, "it computed or stored wrong values")
        self.unwanted_hosts |= corrupt

    def _is_refused_for_now(self, outcome: Outcome) -> bool:
        """Return whether a refused restart may succeed later, as when the command worked before.

        A file server or host may be unreachable for a few minutes, or ranks from the last launch
        may still be running.
        """
        return outcome.exit_code == EXIT_REFUSED and (
            self.restarts.has_trained
            or (self.attempts > 1 and any(IN_USE in line for line in outcome.error_lines))
        )

    # ---- One launch

    def _wait_for_an_earlier_run(self) -> None:
        """Wait for the processes of a killed supervisor's launches to exit.

        A new launch would be refused until their ranks have saved.
        """
        deadline, logged = time.monotonic() + EARLIER_RUN_SECONDS, False
        while (left := left_behind(self.run_dir)) and time.monotonic() < deadline:
            if not logged:
                self.log(f"waiting for the processes of an earlier supervisor to end: {left}")
                logged = True
            if self._stop_signal() is not None:
                raise StopRequested
            time.sleep(POLL_SECONDS)

    def _start(self, command: list[str]) -> Attempt:
        self.log(f"attempt {self.attempts}: {' '.join(command)}")
        mark = f"{self.identity}-{self.attempts}"
        return Attempt(command, mark, self.run_dir, imports=self.imports)

    def _watch(self, attempt: Attempt) -> Outcome:
        forwarded, problem = self.stop_reason is not None, None
        while attempt.running():
            if attempt.problem != problem:
                problem = attempt.problem
                self.log(f"{problem}; the run continues")
            if self.signals.count(signal.SIGINT) > 1:
                killed = attempt.kill()
                self.log(f"second Ctrl-C: killed all processes of the run ({len(killed)})")
                attempt.finish()
                sys.exit(128 + signal.SIGINT)
            number = self._stop_signal()
            if number is not None and not forwarded:
                forwarded = True
                self.log(f"{self.stop_reason}: asking the ranks to save and stop")
                if not attempt.request_stop(number):
                    attempt.kill()
                    attempt.finish()
                    raise StopRequested
            time.sleep(POLL_SECONDS)
        outcome = attempt.finish()
        self.left = attempt.left_on_other_hosts()
        return outcome

    def _stop_signal(self) -> signal.Signals | None:
        """Return the signal to send to the ranks, or None if no stop was requested."""
        if self.signals:
            number = signal.Signals(self.signals[0])
            self.stop_reason = self.stop_reason or number.name
            return number
        elapsed = time.monotonic() - self.started
        if self.policy.deadline is not None and elapsed > self.policy.deadline:
            self.stop_reason = self.stop_reason or "--deadline"
            return signal.SIGUSR1
        return None

    def _wait(self, seconds: float) -> None:
        self.log(f"restarting in {seconds:.0f} s" if seconds else "restarting")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._stop_signal() is not None:
                raise StopRequested
            time.sleep(POLL_SECONDS)

    # ---- After a failure

    def _log_failure(self, outcome: Outcome) -> None:
        if any(signal.SIGBUS.name in reason for reason in outcome.reasons):
            outcome.reasons += shortened_files(self.run_dir) or [limits.bus_error()]
        self.log(f"attempt {self.attempts} failed {outcome.place}")
        for reason in outcome.reasons:
            self.log(f"  {reason}")
        self._event("attempt_failed", outcome, reasons=outcome.reasons, **outcome.downtime)
        self._guarded("write the HTML report", self._start_report)

    def _start_report(self) -> None:
        self._end_report(0.0)  # end the previous report, whose process may hang
        self.html_report = report_process.start_for(self.run_dir)
        self.signals_before_report = len(self.signals)

    def _end_report(self, seconds: float) -> None:
        """Wait for the HTML report until `seconds` have passed or a signal arrives, then end it."""
        if self.html_report is not None:
            deadline = time.monotonic() + seconds
            self.html_report.wait(deadline, lambda: len(self.signals) > self.signals_before_report)
            self.html_report.kill()
            self.html_report = None

    # ---- Console, events and run directory

    def log(self, message: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal or a full disk
            print(masked(f"supervise: {message}"), file=sys.stderr, flush=True)

    def _guarded(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a bookkeeping function; if it raises an exception, log that and return None.

        A bookkeeping error must not stop a run that could continue.
        """
        try:
            return call(*arguments)
        except Exception as error:
            self.log(f"cannot {what}: {error!r}; continuing without it")
            return None

    def _event(self, event: str, outcome: Outcome, **values: Any) -> None:
        def append() -> None:
            if RunFiles(self.run_dir).events.exists():
                step = outcome.step or 0
                events.append_event(self.run_dir, event, step, attempt=self.attempts, **values)

        self._guarded(f"log the event {event}", append)

    def _remove_unused_run_dir(self) -> None:
        """Remove the run directory if the run was refused and wrote nothing."""
        lock = RunFiles(self.run_dir).supervisor
        if self.run_dir.is_dir() and list(self.run_dir.iterdir()) == [lock]:
            lock.unlink()
            self.run_dir.rmdir()


def shortened_files(run_dir: Path) -> list[str]:
    """Return a problem for each shard of a run that is shorter than it should be.

    Reading the missing part of a memory-mapped shard causes SIGBUS.
    """
    from zerolm.config.settings import split_weight
    from zerolm.shards.reader import open_source

    lines: list[str] = []
    try:
        settings = (find_run_json(run_dir) or {}).get("settings", {})
        paths = [split_weight(spec)[0] for spec in settings.get("data", [])]
        paths += settings.get("val_data", [])
    except RecordError:
        return lines  # the next start reports the error
    for path in paths:
        try:
            lines += open_source(path).files.size_problems()
        except ShardError as error:
            lines += error.problems
    return lines


def _lock_run_directory(run_dir: Path) -> FileLock:
    """Lock a run directory for this supervisor; the lock is released when this process exits."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        owner = json.dumps({"host": os.uname().nodename, "pid": os.getpid()}) + "\n"
        lock = FileLock(RunFiles(run_dir).supervisor, owner=owner)
    except LockTaken as error:
        raise ConfigError(
            f"--run_dir {run_dir}: another supervisor is using it ({error.owner}). Stop that one, "
            f"or choose another directory."
        ) from None
    except OSError as error:
        raise ConfigError(f"--run_dir {run_dir}: {error}. Choose another directory.") from None
    if lock.unsupported is not None:  # Lustre and NFS may be mounted without locking
        print(f"supervise: note: {run_dir}: cannot be locked ({lock.unsupported})", file=sys.stderr)
    return lock
