"""`rank0.log`: the lines that rank 0 prints, stored in the run directory with timestamps.

Once the run directory exists, the file receives everything that Python code writes to standard
output and standard error. Output that libraries such as NCCL write directly to the file descriptors
appears only on the console. The file is for people: no program reads it, and a run continues
without it.
"""

import contextlib
import logging
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from zerolm.common.secrets import masked
from zerolm.common.values import printable
from zerolm.run_dir.files import RunFiles

MAX_BYTES = 8 << 20  # maximum size of a file; one older file is kept

_log: "ConsoleLog | None" = None  # the log of this process


class ConsoleLog:
    """The log file of this process.

    Args:
        run_dir: an existing run directory.
    """

    def __init__(self, run_dir: Path):
        files = RunFiles(run_dir)
        self.path, self.earlier = files.console, files.earlier_console
        self.pid, self.warned = os.getpid(), False

    def write(self, lines: str) -> None:
        """Append complete lines. If this fails, the lines are lost, and a note is printed once."""
        if os.getpid() != self.pid:
            return  # this is a forked loader worker, which might rename the file concurrently
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines.split("\n"))
        text = "".join(f"{stamp}{printable(masked(line), chr(9))}\n" for line in shown)
        try:
            with open(self.path, "ab", buffering=0, opener=_without_waiting) as file:
                file.write(text.encode(errors="backslashreplace"))
                full = file.tell() > MAX_BYTES
            if full:
                self.path.replace(self.earlier)
        except OSError as error:
            if not self.warned:
                self.warned = True
                with contextlib.suppress(OSError):
                    print(f"note: {self.path}: lines are missing from here on: {error.strerror}")


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; raise OSError if it is a pipe without a reader instead of waiting."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


class _KeptStream:
    """A stream whose complete lines are also written to the log."""

    def __init__(self, stream: TextIO, log: ConsoleLog):
        self.stream, self._log, self._partial = stream, log, ""

    def write(self, text: str) -> int:
        written = self.stream.write(text)
        lines, newline, self._partial = (self._partial + text).rpartition("\n")
        if newline:
            self._log.write(lines)
        else:
            self._partial = self._partial.rpartition("\r")[2]  # a progress bar that is redrawn
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def keep(run_dir: Path) -> None:
    """Log everything that this process prints from now on. Rank 0 only.

    Existing loggers that write to these streams, such as DeepSpeed's, are switched to the logged
    streams.
    """
    global _log
    _log = ConsoleLog(run_dir)
    command = " ".join(sys.argv)
    _log.write(f"== {platform.node()}, pid {os.getpid()}, UTC{time.strftime('%z')}: {command}")
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [each for logger in loggers for each in getattr(logger, "handlers", ())]
    for name in ("stdout", "stderr"):
        kept: Any = _KeptStream(getattr(sys, name), _log)
        setattr(sys, name, kept)
        for handler in handlers:
            if getattr(handler, "stream", None) is getattr(sys, f"__{name}__"):
                handler.setStream(kept)


def write(lines: str) -> None:
    """Write lines to the log only; the console shows them in another form or not at all."""
    if _log is not None:
        _log.write(lines)
