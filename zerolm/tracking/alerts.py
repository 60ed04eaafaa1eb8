"""Which events and metrics are worth waking somebody for, how loudly, and how often. Pure.

Knows no tracker: it gives titles, texts and levels, in the terms that W&B has for them.
"""

import math
import statistics
from collections import deque
from typing import Any, NamedTuple

Row = dict[str, Any]

INFO, WARN, ERROR = "INFO", "WARN", "ERROR"
SAME_TITLE_SECONDS = 600.0  # between two alerts of one title
MOST_IN_AN_HOUR = 20
LOW_MFU_SHARE, MFU_ROWS, LOW_ROWS = 0.7, 20, 3

# event: (level, title, the key that says more)
EVENTS = {
    "resume": (INFO, "restarted", "checkpoint"),
    "spike": (WARN, "loss spike", "reason"),
    "rollback": (WARN, "rolled back", "reason"),
    "damaged": (WARN, "damaged checkpoint", "checkpoint"),
    "checkpoint_failed": (ERROR, "checkpoint not written", "error"),
    "attempt_failed": (WARN, "an attempt failed", "reasons"),
    "supervisor_stopped": (ERROR, "supervisor stopped", "reason"),
    "rank_lost": (ERROR, "a rank was lost", "ended"),
    "hang": (ERROR, "hang", "ended"),
    "launcher_lost": (ERROR, "launcher lost", "reason"),
    "failed": (ERROR, "failed", "reason"),
    "gave_up": (ERROR, "gave up", "reason"),
}


class Alert(NamedTuple):
    """Something to be told: `level` is INFO, WARN or ERROR."""

    title: str
    text: str
    level: str


def of_event(event: Row) -> Alert | None:
    """Return the alert that an event of `events.jsonl` is worth, if it is."""
    kind = event.get("event", "")
    if kind not in EVENTS:
        return None
    level, title, key = EVENTS[kind]
    if kind == "spike" and not _finite(event):
        level, title = ERROR, "not a finite number"
    text = f"step {event.get('step')}, {event.get('time')}: {kind}"
    if event.get(key):
        text += f": {event[key]}"
    return Alert(title, text[:1000], level)


def _finite(event: Row) -> bool:
    """Tell whether both numbers are; events.jsonl has them as words, as JSON has no infinity."""
    try:
        return all(math.isfinite(float(event.get(key, 0.0))) for key in ("loss", "grad_norm"))
    except (TypeError, ValueError):
        return False


class LowMfu:
    """Notices that the devices compute much less than they did: `throughput/mfu` of some rows."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=MFU_ROWS)
        self._low = 0

    def judge(self, row: Row) -> Alert | None:
        """Return an alert with the third low row running; the next after a usual one."""
        mfu = row.get("throughput/mfu")
        if mfu is None:
            return None
        usual = statistics.median(self._usual) if len(self._usual) >= MFU_ROWS // 2 else 0.0
        if mfu >= LOW_MFU_SHARE * usual:
            self._usual.append(mfu)
            self._low = 0
            return None
        self._low += 1
        if self._low != LOW_ROWS:
            return None
        text = (
            f"step {row['step']}: throughput/mfu is {mfu:.1%}, usually {usual:.1%}: see "
            f"throughput/data_seconds, throughput/slowest_rank and checkpoint/stall_seconds"
        )
        return Alert("low MFU", text, WARN)


class Limit:
    """Lets an alert through, unless the like was told a short while ago, or too many were."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._hour: deque[float] = deque()

    def allows(self, alert: Alert, now: float) -> bool:
        """Tell whether an alert is sent; it counts as sent then.

        Args:
            now: in seconds.
        """
        while self._hour and now - self._hour[0] >= 3600:
            self._hour.popleft()
        last = self._told.get(alert.title)
        if last is not None and now - last < SAME_TITLE_SECONDS:
            return False
        if len(self._hour) >= MOST_IN_AN_HOUR and alert.level != ERROR:
            return False
        self._told[alert.title] = now
        self._hour.append(now)
        return True
