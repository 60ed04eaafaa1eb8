"""Alerts for people: which events and metrics trigger alerts, their levels, and rate limits.

The levels are those of W&B. Must not depend on a tracker.
"""

import math
import statistics
from collections import deque
from typing import Any, NamedTuple

from zerolm.run_dir.events import EVENTS

Row = dict[str, Any]

INFO, WARN, ERROR = "INFO", "WARN", "ERROR"
SAME_TITLE_SECONDS = 600.0  # minimum time between two alerts with the same title
MAX_PER_HOUR = 20
LOW_MFU_SHARE, MFU_ROWS, LOW_ROWS = 0.7, 20, 3


class Alert(NamedTuple):
    """A message for people; `level` is INFO, WARN or ERROR."""

    title: str
    text: str
    level: str


def of_event(event: Row) -> Alert | None:
    """Return the alert for an event in `events.jsonl`; None if the event triggers no alert."""
    kind = EVENTS.get(event.get("event", ""))
    if kind is None or kind.alert is None or event.get("slow") is False:  # the host is fast again
        return None
    level, title, detail = kind.alert
    if kind.name == "spike" and not _finite(event):
        level, title = ERROR, "not a finite number"
    text = f"step {event.get('step')}, {event.get('time')}: {kind.name}"
    if event.get(detail):
        text += f": {event[detail]}"
    return Alert(title, text[:1000], level)


def _finite(event: Row) -> bool:
    """Return whether an event's loss and norm are finite.

    Both may be strings, since JSON has no infinity.
    """
    try:
        return all(math.isfinite(float(event.get(key, 0.0))) for key in ("loss", "grad_norm"))
    except (TypeError, ValueError):
        return False


class LowMfuDetector:
    """Detects that `throughput/mfu` stays far below its recent median."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=MFU_ROWS)
        self._low = 0

    def check(self, row: Row) -> Alert | None:
        """Return an alert after three consecutive low rows; a normal row re-arms the detector."""
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


class RateLimit:
    """Drops alerts with a recently sent title and, above `MAX_PER_HOUR`, all except errors."""

    def __init__(self) -> None:
        self._sent: dict[str, float] = {}  # {title: time of the last alert in seconds}
        self._hour: deque[float] = deque()

    def allows(self, alert: Alert, now: float) -> bool:
        """Return whether to send an alert; if so, count it as sent. The clock may jump back."""
        while self._hour and not 0 <= now - self._hour[0] < 3600:
            self._hour.popleft()
        last = self._sent.get(alert.title)
        if last is not None and 0 <= now - last < SAME_TITLE_SECONDS:
            return False
        if len(self._hour) >= MAX_PER_HOUR and alert.level != ERROR:
            return False
        self._sent[alert.title] = now
        self._hour.append(now)
        return True
