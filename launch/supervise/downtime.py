"""The first two parts of a recovery: time to notice a failure, and time for the launch to end."""

import contextlib
from collections.abc import Iterable
from typing import Any

from zerolm.run_dir.files import RunFiles
from zerolm.watchdog.progress import Heartbeat


def downtime(
    files: RunFiles, heartbeats: Iterable[Heartbeat], launcher_ended: float, ended: float
) -> dict[str, Any]:
    """Return the keys to add to the event `attempt_failed`; {} if no rank had connected.

    Ranks that wait for a dead rank make no progress, so the failure began when any rank last made
    progress. The failure was noticed when a rank published its verdict, or else when the launcher
    exited.

    Args:
        heartbeats: the last heartbeat of each rank in the launch.
        launcher_ended, ended: when the exits of the launcher and of the last process were observed,
            measured with `time.time`, like file times.
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
    # Later progress does not count: a stopped rank runs again for a moment to write its stacks.
    began = max((at for at in progressed if at <= noticed), default=noticed)
    parts = {"noticed": noticed - began, "ended": ended - noticed}
    shown = {name: round(max(0.0, seconds), 2) for name, seconds in parts.items()}
    return {"parts": shown, "ended_at": round(ended, 2)}
