"""When a launch failed, was noticed to have failed, and ended: the first parts of a recovery."""

import contextlib
from collections.abc import Iterable
from typing import Any

from zerolm.run_dir.files import RunFiles
from zerolm.watchdog.progress import Heartbeat


def downtime(
    files: RunFiles, heartbeats: Iterable[Heartbeat], launcher_ended: float, ended: float
) -> dict[str, Any]:
    """Return the parts of the event `attempt_failed`; {} if no rank had connected.

    A rank that waits for a dead one makes no progress, so the fault began at the last progress of
    any rank. It was noticed when a rank published its verdict, or else when the launcher ended.

    Args:
        heartbeats: the launch's last heartbeat of each rank.
        launcher_ended, ended: when the launcher and then the last process were seen to have ended,
            on the clock of `time.time`, like the times of files.
    """
    progressed, noticed = [], launcher_ended
    for beat in heartbeats:
        with contextlib.suppress(OSError):
            written = files.heartbeat(beat["rank"]).stat().st_mtime
            progressed.append(written - beat["quiet_seconds"])
        with contextlib.suppress(OSError):
            verdict = files.verdict(str(beat["token"])).stat().st_mtime
            noticed = min(noticed, verdict)
    if not progressed:
        return {}
    # A stopped rank keeps running for a moment when it is asked for its stacks.
    began = max((at for at in progressed if at <= noticed), default=noticed)
    parts = {"noticed": noticed - began, "ended": ended - noticed}
    shown = {name: round(max(0.0, seconds), 2) for name, seconds in parts.items()}
    return {"parts": shown, "ended_at": round(ended, 2)}
