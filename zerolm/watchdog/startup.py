"""How long each part of a start takes, up to the end of the first step.

pretrain.py marks the end of each part in its process. The first parts ended before its code ran:
the kernel knows when the processes of the launcher and this one began. Standard library only.
"""

import os
import time

from zerolm.common import processes

TICKS = os.sysconf("SC_CLK_TCK")
_ends: dict[str, float] = {}


def mark(part: str) -> None:
    """Record that a part of the start has ended now."""
    _ends[part] = _now()


def parts(launcher: processes.Process | None) -> dict[str, float]:
    """Return the seconds of each part, in order.

    Args:
        launcher: the process that began the start, if there is one.
    """
    own = processes.inspect_process(os.getpid())
    assert own is not None, "this process is in /proc"
    created = own.start_ticks / TICKS
    ends = {"launcher": created} if launcher is not None else {}
    ends |= _ends
    seconds, before = {}, created if launcher is None else launcher.start_ticks / TICKS
    for part, end in ends.items():
        seconds[part] = round(end - before, 2)
        before = end
    return seconds


def _now() -> float:
    """Return the time on the clock of /proc: seconds since the machine booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
