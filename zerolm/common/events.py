"""One line of `events.jsonl`, written by whoever knows it: the run, or a process that serves it.

A line is one write to a file opened for appending, so that several processes of a host may do it at
the same time, and a killed one leaves at most half a line. Standard library only.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


def line(event: str, step: int, **what: Any) -> str:
    """Return an event as it stands in the file, without the end of the line."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return json.dumps({"event": event, "step": step, "time": stamp, **what})


def append(run_dir: str | Path, event: str, step: int, **what: Any) -> None:
    """Append an event to a run directory, for a process that holds no log of the run.

    Args:
        step: that it is about; -1 when it is about none.
    """
    append_line(Path(run_dir) / EVENTS, line(event, step, **what))


def append_line(path: Path, text: str) -> None:
    """Append one line, on a line of its own even when a killed process left half of one."""
    with open(path, "a+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        half = bool(size) and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write((b"\n" if half else b"") + text.encode() + b"\n")
