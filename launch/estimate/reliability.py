"""Time lost to failures and checkpoints, and the checkpoint interval that minimizes it."""

import math
from dataclasses import dataclass

from zerolm.plan.lost_time import HOUR, Lost, expected


@dataclass(frozen=True)
class Interruptions:
    """Time that a run loses to failures and checkpoints.

    Attributes:
        mean_seconds: mean time between interruptions.
        expected: expected number of interruptions.
        interval_seconds: time between checkpoints that minimizes the expected lost time.
        lost: shares of time lost.
        hourly: shares of time lost with one fault per hour and a checkpoint every
            `hourly_seconds`.
    """

    mean_seconds: float
    expected: float
    interval_seconds: float
    lost: Lost
    hourly: Lost
    hourly_seconds: float


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
        stall_seconds: time that training waits for a checkpoint.
        write_seconds: time to write a checkpoint in the background; the interval between
            checkpoints is never shorter.
        restart_seconds: time from an interruption until training resumes, not including repeated
            steps.

    Source: Daly 2006, A higher order estimate of the optimum checkpoint interval for restart
    dumps, equation 37; its first term is Young 1974.
    """
    hourly_seconds = max(daly_interval(stall_seconds, HOUR), write_seconds)
    hourly = expected(HOUR, hourly_seconds, stall_seconds, write_seconds, restart_seconds)
    rate = failures_per_device_hour * devices / HOUR
    if rate <= 0:
        return Interruptions(math.inf, 0.0, math.inf, Lost(0, 0, 0), hourly, hourly_seconds)
    mean = 1 / rate
    interval = max(daly_interval(stall_seconds, mean), write_seconds)
    lost = expected(mean, interval, stall_seconds, write_seconds, restart_seconds)
    return Interruptions(mean, run_seconds / mean, interval, lost, hourly, hourly_seconds)


def daly_interval(stall_seconds: float, mean_seconds: float) -> float:
    """Return the checkpoint interval in seconds that minimizes the expected lost time."""
    if stall_seconds >= 2 * mean_seconds:
        return mean_seconds
    young = math.sqrt(2 * stall_seconds * mean_seconds)
    ratio = stall_seconds / (2 * mean_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds
