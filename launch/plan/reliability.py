"""Interruptions, checkpoints, and how often to save: what a long run loses, and the least of it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interruptions:
    """What failures and checkpoints cost a run.

    Attributes:
        mean_seconds: between two interruptions of the whole run.
        expected: interruptions of the run.
        interval_seconds: between checkpoints, at which the least is lost.
        lost_share: of the time: stalls, work done again, restarts.
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
    """Return what a run has to expect, and the interval of checkpoints that loses least.

    Args:
        stall_seconds: that training stands still for a checkpoint.
        write_seconds: until it is whole, behind training; a shorter interval cannot be kept.
        restart_seconds: from an interruption until training goes on, work done again left out.

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
    """Return the seconds of work between two checkpoints that lose least."""
    if stall_seconds >= 2 * mean_seconds:
        return mean_seconds
    young = math.sqrt(2 * stall_seconds * mean_seconds)
    ratio = stall_seconds / (2 * mean_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds
