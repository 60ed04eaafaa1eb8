"""Time lost to failures and checkpoints, and the checkpoint interval that loses the least."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interruptions:
    """Time that failures and checkpoints cost a run.

    Attributes:
        mean_seconds: mean time between interruptions of the run.
        expected: number of interruptions of the run.
        interval_seconds: between checkpoints, with the least expected loss.
        lost_share: of the time, to stalls, repeated work and restarts.
    """

    mean_seconds: float
    expected: float
    interval_seconds: float
    lost_share: float


def interruptions(
    run_seconds: float,
    devices: int,
    failures_per_device_hour: float,
    stall_seconds: float,
    write_seconds: float,
    restart_seconds: float,
) -> Interruptions:
    """Return the expected interruptions, the best checkpoint interval and the time lost.

    Args:
        stall_seconds: for which training waits for a checkpoint.
        write_seconds: to write a checkpoint in the background; the interval is at least this long.
        restart_seconds: from an interruption until training resumes, without repeated work.

    Source: Daly 2006, A higher order estimate of the optimum checkpoint interval for restart
    dumps, equation 37; its first term is Young 1974.
    """
    rate = failures_per_device_hour * devices / 3600
    if rate <= 0:
        return Interruptions(math.inf, 0.0, math.inf, 0.0)
    mean = 1 / rate
    interval = daly_interval(stall_seconds, mean)
    interval = max(interval, write_seconds)
    lost = stall_seconds / interval + (interval / 2 + write_seconds / 2 + restart_seconds) / mean
    return Interruptions(mean, run_seconds / mean, interval, min(1.0, lost))


def daly_interval(stall_seconds: float, mean_seconds: float) -> float:
    """Return the seconds between two checkpoints that minimize the expected loss."""
    if stall_seconds >= 2 * mean_seconds:
        return mean_seconds
    young = math.sqrt(2 * stall_seconds * mean_seconds)
    ratio = stall_seconds / (2 * mean_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds
