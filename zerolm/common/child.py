"""`Child`: a zerolm process that runs in the background of a run.

Each tracker, the HTML report and the uploads run in child processes, so a slow or failing child
neither delays a step nor ends the run. The run uses `Child`; the child process calls `serve`.
Standard library only.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from zerolm.common import processes
from zerolm.common.shipped import module_command, shield

MAX_PAUSE_SECONDS = 600.0
WAIT_SECONDS = 0.05


class Child:
    """Runs `python -m zerolm ARGUMENTS --of_process PID`, at most one process at a time.

    The owner calls `start` when the child is `due`, and `poll` regularly; only `wait` blocks.

    Args:
        arguments: a zerolm command and its arguments.
        log: file to append the child's output to, created with its directory; None: inherit the
            output of this process.
        supervised: whether `launch supervise` waits for the process to exit before it restarts the
            run.
        endless: whether the process must never exit on its own, so even exit code 0 is a failure.
        first_pause_seconds: pause after the first failure before the process is due again; doubled
            after each further failure.
        max_failures: number of failures after which the process is never due again.
    """

    def __init__(
        self,
        *arguments: object,
        log: Path | None = None,
        supervised: bool = False,
        endless: bool = False,
        first_pause_seconds: float = 0.0,
        max_failures: float = float("inf"),
    ):
        self.command = module_command("zerolm", *arguments, "--of_process", os.getpid())
        self.log, self.supervised, self.endless = log, supervised, endless
        self.first_pause_seconds, self.max_failures = first_pause_seconds, max_failures
        self.process: subprocess.Popen[bytes] | None = None
        self.failures = 0  # since the last success
        self._start_at = 0.0

    @property
    def running(self) -> bool:
        """Whether a process was started whose exit `poll` has not reported yet."""
        return self.process is not None

    def due(self) -> bool:
        """Return whether the process is not running and may be started now."""
        allowed = not self.running and self.failures < self.max_failures
        return allowed and time.monotonic() >= self._start_at

    def start(self, stdin: int = subprocess.DEVNULL) -> None:
        """Start the process.

        Raises:
            OSError: the process cannot be started. The child is not due again for
                `MAX_PAUSE_SECONDS`.
        """
        try:
            with contextlib.ExitStack() as stack:
                output = None
                if self.log is not None:
                    self.log.parent.mkdir(exist_ok=True)
                    output = stack.enter_context(open(self.log, "ab"))
                # These signals are blocked until `serve` ignores them, since a launcher may signal
                # the child while it starts.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
                self.process = subprocess.Popen(
                    self.command,
                    env=_environment(self.supervised),
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                )
        except OSError:
            self._start_at = time.monotonic() + MAX_PAUSE_SECONDS
            raise

    def poll(self) -> int | None:
        """Return the exit code if the process has exited since the last call.

        Takes microseconds.
        """
        code = None if self.process is None else self.process.poll()
        if code is None:
            return None
        self.process = None
        if code == 0 and not self.endless:
            self.failures = 0
        else:
            pause_seconds = self.first_pause_seconds * 2.0 ** min(self.failures, 30)
            self._start_at = time.monotonic() + min(pause_seconds, MAX_PAUSE_SECONDS)
            self.failures += 1
        return code

    def wait(
        self,
        deadline: float,
        cancelled: Callable[[], bool] = lambda: False,
        waiting: Callable[[], object] = lambda: None,
    ) -> int | None:
        """Wait until the process exits.

        Args:
            deadline: time on the clock of `time.monotonic`.
            cancelled: function that returns True to stop waiting early.
            waiting: called every `WAIT_SECONDS`, to show the watchdog that this process is not
                hanging.

        Returns:
            The exit code, or None if the process is still running or was not started.
        """
        while (code := self.poll()) is None and self.running:
            if time.monotonic() >= deadline or cancelled():
                break
            time.sleep(WAIT_SECONDS)
            waiting()
        return code

    def kill(self) -> None:
        """Kill the process if it is still running."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.poll()


def _environment(supervised: bool) -> dict[str, str]:
    """Return environment variables with which a child imports the same zerolm as this process."""
    environment = dict(os.environ)
    shield(environment)
    if not supervised:
        environment.pop(processes.SUPERVISOR, None)
    return environment


def serve(pid: int) -> None:
    """Lower this child process's priorities, and make it exit with its parent, process `pid`.

    The child ignores stop signals, because the run handles them: it saves first, and then gives the
    child time to finish.
    """
    os.nice(19)
    os.setpgrp()  # so Ctrl-C does not reach this process's own subprocesses, such as W&B's service
    with contextlib.suppress(Exception):  # not supported by every kernel or container
        import psutil

        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    for number in processes.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOP_SIGNALS)

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
