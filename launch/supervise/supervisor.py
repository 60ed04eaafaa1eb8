"""Keep a run going: start it, and start it again after a failure, until it is done.

The command goes on with its run by itself, so a restart is the same command. What a person would
look at before is looked at here: is the failure always in the same step, does the run get ahead at
all, are the hosts well. A request to stop is passed on to the ranks, and no restart follows it.
"""

import fcntl
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from launch.attempt import Attempt, Ending
from launch.command_words import run_directory_of
from launch.hosts import renewed
from zerolm import events, reporting
from zerolm.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_GAVE_UP,
    EXIT_REFUSED,
    EXIT_STOPPED,
    ConfigError,
)

POLL_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
IN_USE = "another run is writing to it now"  # zerolm/run_directory.py says so


@dataclass(frozen=True)
class Policy:
    """How failures are answered.

    Attributes:
        max_restarts: restarts in a row without a newer checkpoint.
        same_step_limit: failures of one step, after which a restart will not help.
        backoff, max_backoff: seconds before a restart, doubled each time without progress.
        deadline: seconds from the start of the supervisor after which the run is asked to stop.
        min_hosts: fewer good hosts than this and the run is not started; None: all that it needs.
        host_check: command for each host's shell that fails where something is wrong.
        requeue: give the Slurm job back to the queue when the run stopped before it was done.
    """

    max_restarts: int = 20
    same_step_limit: int = 3
    backoff: float = 5.0
    max_backoff: float = 300.0
    deadline: float | None = None
    min_hosts: int | None = None
    host_check: str | None = None
    requeue: bool = False


class StopAsked(Exception):
    """A signal or the deadline came while nothing was running."""


class Supervisor:
    """Runs one command until its run is done.

    Args:
        command: `deepspeed ... pretrain.py ...`.

    Raises:
        ConfigError: the command is not one, or another supervisor has its run directory.
    """

    def __init__(self, command: Sequence[str], policy: Policy):
        self.command, self.policy = list(command), policy
        self.run_dir = run_directory_of(self.command)
        self.identity = secrets.token_hex(8)
        self.number = self.restarts = 0
        self.failures: Counter[int | None] = Counter()
        self.checkpoint_at_failure = -1
        self.signals: list[int] = []
        self.stop_reason: str | None = None
        self.page: subprocess.Popen[bytes] | None = None  # being written, of the last failure
        self.signals_before_page = 0
        self.began = time.monotonic()
        self.created = not self.run_dir.exists()
        self.lock = _claim(self.run_dir)

    def run(self) -> int:
        """Supervise until the end; return the exit code of the run."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: self.signals.append(number))
        code = EXIT_BUG
        try:
            code = self._run()
        except StopAsked:
            self.say(f"stopped on request ({self.stop_reason}): nothing was running")
            code = EXIT_STOPPED
        except ConfigError as error:
            self.say(str(error))
            code = EXIT_STOPPED if self._requeue() else error.exit_code
        finally:
            self._end_page(reporting.FINISH_SECONDS if code == EXIT_BUG else 0.0)
            self.lock.close()
            if self.created:
                self._leave_nothing()
        if code == EXIT_STOPPED and self.stop_reason != "SIGINT":
            self._requeue()
        return code

    def _run(self) -> int:
        while True:
            command = renewed(
                self.command, self.run_dir, self.policy.min_hosts, self.policy.host_check, self.say
            )
            self.number += 1
            ending = self._attempt(command)
            name = {
                EXIT_DONE: "done", EXIT_STOPPED: "stopped on request, start me again",
                EXIT_GAVE_UP: "gave up", EXIT_REFUSED: "refused",
            }.get(ending.code)  # fmt: skip
            if name is not None and not self._must_try_again(ending):
                self.say(f"{name}: exit code {ending.code}")
                for reason in ending.reasons:
                    self.say(f"  {reason}")
                return ending.code
            if self.stop_reason is not None:
                self._report(ending)
                self.say(
                    f"was asked to stop ({self.stop_reason}), but failed before it had saved; "
                    f"{self._newest_checkpoint_words()}"
                )
                return EXIT_BUG
            self._report(ending)
            if (diagnosis := self._hopeless(ending)) is not None:
                self.say(diagnosis)
                self._event("supervisor_stopped", ending, reason=diagnosis)
                return EXIT_BUG
            self._wait(self._pause_seconds())
            self.restarts += 1

    def _must_try_again(self, ending: Ending) -> bool:
        """Tell whether a refusal is only that of the launch before, not quite ended elsewhere."""
        return (
            ending.code == EXIT_REFUSED
            and self.number > 1
            and any(IN_USE in line for line in ending.lines)
        )

    # ---- One launch

    def _attempt(self, command: list[str]) -> Ending:
        self.say(f"attempt {self.number}: {' '.join(command)}")
        attempt = Attempt(command, f"{self.identity}-{self.number}", self.run_dir)
        asked = self.stop_reason is not None
        while attempt.running():
            if self.signals.count(signal.SIGINT) > 1:
                ended = attempt.kill()
                self.say(f"second Ctrl-C: ended everything at once, {len(ended)} processes")
                attempt.finish()
                sys.exit(128 + signal.SIGINT)
            number = self._asked()
            if number is not None and not asked:
                asked = True
                self.say(f"{self.stop_reason}: asking the ranks to save and stop")
                if not attempt.ask_to_stop(number):
                    attempt.kill()
                    attempt.finish()
                    raise StopAsked
            time.sleep(POLL_SECONDS)
        return attempt.finish()

    def _asked(self) -> signal.Signals | None:
        """Return the signal that the ranks should get, if this process was asked to stop."""
        if self.signals:
            number = signal.Signals(self.signals[0])
            self.stop_reason = self.stop_reason or number.name
            return number
        late = time.monotonic() - self.began
        if self.policy.deadline is not None and late > self.policy.deadline:
            self.stop_reason = self.stop_reason or "--deadline"
            return signal.SIGUSR1
        return None

    def _wait(self, seconds: float) -> None:
        self.say(f"restart in {seconds:.0f} s")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._asked() is not None:
                raise StopAsked
            time.sleep(POLL_SECONDS)

    # ---- After a failure

    def _report(self, ending: Ending) -> None:
        where = "before its first step" if ending.step is None else f"in step {ending.step}"
        self.say(f"attempt {self.number} failed {where}")
        for reason in ending.reasons:
            self.say(f"  {reason}")
        self._event("attempt_failed", ending, reasons=ending.reasons)
        self._end_page(0.0)  # one of the failure before is stuck
        self.page, self.signals_before_page = reporting.begin_for(self.run_dir), len(self.signals)

    def _end_page(self, seconds: float) -> None:
        """Wait so long for the page of a failure, if nobody asks for an end meanwhile."""
        deadline = time.monotonic() + seconds
        while self.page is not None:
            asked = len(self.signals) > self.signals_before_page
            if self.page.poll() is None and (asked or time.monotonic() > deadline):
                self.page.kill()
                self.page.wait()
            if self.page.poll() is not None:
                self.page = None
            else:
                time.sleep(POLL_SECONDS)

    def _hopeless(self, ending: Ending) -> str | None:
        """Return why a restart would not help, with what is known and what to try; else None."""
        self.failures[ending.step] += 1
        checkpoint = self._newest_checkpoint()
        if checkpoint > self.checkpoint_at_failure:
            self.checkpoint_at_failure, self.restarts = checkpoint, 0
        limit = self.policy.same_step_limit
        if self.failures[ending.step] >= limit:
            return self._diagnosis(ending)
        if self.restarts >= self.policy.max_restarts:
            return (
                f"{self.restarts} restarts without a newer checkpoint: no more. "
                f"Save more often (--checkpoint_interval), or mend what fails."
            )
        return None

    def _diagnosis(self, ending: Ending) -> str:
        count = self.failures[ending.step]
        where = "before its first step" if ending.step is None else f"in step {ending.step}"
        lines = [f"stops: the run has failed {count} times {where}.", *ending.reasons]
        if ending.sequences is not None:
            first, number = ending.sequences
            lines.append(f"sequences of that step: {first} to {first + number - 1}")
        lines += [f"said: {line[:300]}" for line in ending.lines]
        lines.append(self._newest_checkpoint_words())
        lines.append(
            "try: read the stacks and the lines above; run the command without the supervisor; "
            "look at the sequences of the step; fewer ranks or a smaller --micro_batch_size if "
            "memory ran out"
        )
        return "\n    ".join(lines)

    def _pause_seconds(self) -> float:
        """Return the back-off: doubled for each restart without progress, and not quite regular."""
        seconds = self.policy.backoff * 2.0 ** min(self.restarts, 30)
        return min(seconds, self.policy.max_backoff) * random.uniform(0.75, 1.25)

    def _newest_checkpoint(self) -> int:
        """Return the step of the newest published checkpoint, 0 without one."""
        found = (self.run_dir / "checkpoints").glob("step-*/MANIFEST.json")
        return max((int(path.parent.name.rpartition("-")[2]) for path in found), default=0)

    def _newest_checkpoint_words(self) -> str:
        step = self._newest_checkpoint()
        return f"the newest checkpoint is of step {step}" if step else "there is no checkpoint"

    # ---- Hosts and queue

    def _requeue(self) -> bool:
        job = os.environ.get("SLURM_JOB_ID")
        if not self.policy.requeue or job is None:
            return False
        try:
            done = subprocess.run(["scontrol", "requeue", job], timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.say(f"scontrol requeue {job} failed: {error}")
            return False
        self.say(f"scontrol requeue {job}: exit code {done.returncode}")
        return done.returncode == 0

    # ---- What is said and kept of it

    def say(self, words: str) -> None:
        print(f"supervise: {words}", file=sys.stderr, flush=True)

    def _event(self, event: str, ending: Ending, **what: Any) -> None:
        if (self.run_dir / "events.jsonl").exists():
            events.append(self.run_dir, event, ending.step or 0, attempt=self.number, **what)

    def _leave_nothing(self) -> None:
        """Remove the directory again if the run refused to begin in it."""
        if sorted(path.name for path in self.run_dir.iterdir()) == ["supervisor"]:
            (self.run_dir / "supervisor").unlink()
            self.run_dir.rmdir()


def _claim(run_dir: Path) -> TextIO:
    """Lock the run directory for one supervisor; the lock ends with this process.

    Raises:
        ConfigError: another supervisor has it, or it cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / "supervisor", "a+")
    except OSError as error:
        raise ConfigError(f"--run_dir {run_dir}: {error}. Choose one that can be made.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        who = lock.read().strip()
        raise ConfigError(
            f"--run_dir {run_dir}: another supervisor has it now ({who}). Stop that one, or "
            f"choose another directory."
        ) from None
    except OSError as error:  # Lustre and NFS may be mounted without locks
        print(f"supervise: note: {run_dir}: no locks here ({error})", file=sys.stderr)
    lock.truncate(0)
    lock.write(json.dumps({"host": os.uname().nodename, "pid": os.getpid()}) + "\n")
    lock.flush()
    return lock
