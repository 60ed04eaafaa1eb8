"""Publish the ranks to blame for a run's end in a verdict file, on the console and as an event.

The first rank that determines the ranks to blame writes `ranks/verdict-<token>.json`; all other
ranks follow this verdict.
"""

import contextlib
import json
import os
import select
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from zerolm.common.errors import RecordError
from zerolm.common.records import Count, read_record
from zerolm.run_dir import events
from zerolm.run_dir.files import RunFiles


def write_once(path: Path, value: Mapping[str, Any]) -> bool:
    """Create a file with its contents atomically; return False if the file already exists.

    Return True on a full disk or without hard links, so that each rank acts on its own verdict.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    if path.exists():  # so thousands of followers do not each create a temporary file
        return False
    try:
        temporary.write_text(json.dumps(value) + "\n")
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        with contextlib.suppress(OSError):
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


class _Rank(TypedDict):
    rank: Count


class _Verdict(TypedDict):
    ranks: list[_Rank]


def read_ranks(path: Path) -> list[int]:
    """Return the ranks that a verdict blames; [] if the file is damaged."""
    with contextlib.suppress(RecordError):
        if found := read_record(path, _Verdict):
            return [entry["rank"] for entry in found["ranks"]]
    return []


def publish(
    run_dir: Path,
    token: str | None,
    event: str,
    step: int,
    found_by: int,
    how: str | None,
    ranks: list[dict[str, Any]],
    why: str = "",
    **fields: Any,
) -> bool:
    """Write the verdict, print it, and log the event; return False if another rank was first.

    Args:
        token: identifies this launch; None before the ranks are connected, when no other rank would
            read the verdict.
        found_by: rank that determined the ranks to blame.
        how: how the blamed rank's process ended, if it has ended.
        ranks: one entry per blamed rank, with its last activity, `reason` and `stacks`.
        why: why the run ends, if no rank is blamed.
        fields: additional keys for the event.
    """
    mute_broken_output()
    verdict: dict[str, Any] = {"ended": how, "found_by": found_by, "ranks": ranks, **fields}
    if not ranks:
        verdict["reason"] = why
    if token is not None and not write_once(
        RunFiles(run_dir).verdict(token), {"event": event, "step": step, **verdict}
    ):
        return False
    if not ranks:
        print(f"watchdog: {why}. The run was in step {step}", file=sys.stderr, flush=True)
    for entry in ranks:
        device = f", device {entry['device']}" if entry.get("device") is not None else ""
        stage = f", stage {entry['stage']}" if entry.get("stage") else ""
        print(
            f"watchdog: rank {entry['rank']} on {entry['host']} (pid {entry['pid']}{device}"
            f"{stage}) {entry['reason']}. The run was in step {step}; this rank's last heartbeat: "
            f"step {entry['step']}, {entry['phase']}. Stacks: {entry['stacks'] or 'none'}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    log_event(run_dir, event, step, **verdict)
    return True


def log_event(run_dir: Path, event: str, step: int, **fields: Any) -> None:
    """Append an event to the run's log; do nothing if the disk is full."""
    with contextlib.suppress(OSError):
        events.append_event(run_dir, event, step, **fields)


def mute_broken_output() -> None:
    """Redirect closed output streams to /dev/null, so a failing print cannot prevent a save."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(stream, 0)
            if any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0)):
                with open(os.devnull, "w") as devnull:
                    os.dup2(devnull.fileno(), stream)
