"""The first parts of a recovery: until a failure was noticed, and until the launch had ended."""

import contextlib
from collections.abc import Iterable
from typing import Any

from zerolm.run_dir.files import RunFiles
from zerolm.watchdog.progress import Heartbeat


def downtime(
    files: RunFiles, heartbeats: Iterable[Heartbeat], launcher_ended: float, ended: float
) -> dict[str, Any]:
    """Return the keys to add to the event `attempt_failed`; {} if no rank had connected.

    Ranks that wait for a dead rank make no progress, so the failure began when a rank last made
    progress. It was noticed when a rank published its verdict, or else when the launcher ended.

    Args:
        heartbeats: the launch's last heartbeat of each rank.
        launcher_ended, ended: when the launcher and then the last process were seen to have ended,
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
    # A stopped rank runs again for a moment to write its stacks.
    began = max((at for at in progressed if at <= noticed), default=noticed)
    parts = {"noticed": noticed - began, "ended": ended - noticed}
    shown = {name: round(max(0.0, seconds), 2) for name, seconds in parts.items()}
    return {"parts": shown, "ended_at": round(ended, 2)}
