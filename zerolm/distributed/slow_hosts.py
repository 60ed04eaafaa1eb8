"""Finds hosts whose ranks need more time than other hosts' for their own part of each step.

Training is as fast as its slowest rank. At each report, the ranks share the time per step that they
do not spend waiting for other ranks (`Stopwatch.own_seconds`), with one small all-reduce when the
device is idle anyway. A host is slow if its slowest rank needs a tenth more time than the median of
the other hosts. The ratio is the median over the reports of the last three minutes, of which there
must be at least five.
"""

import socket
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from zerolm.distributed.collectives import gather_objects

SLOWER = 1.1  # relative to the median of the other hosts
SECONDS, REPORTS = 180.0, 5  # time span of the reports in a median, and their minimum number


class SlowHosts:
    """Compares ranks and hosts at each report. Every rank makes the same calls."""

    def __init__(self) -> None:
        self._hosts: list[str] = []  # by rank
        self._ratios: dict[str, float] = {}  # {host: ratio in the last report}
        self._recent: dict[str, deque[tuple[float, float]]] = {}  # {host: (time, ratio)}
        self._slow: set[str] = set()

    def row(self, own_seconds: float, device: torch.device) -> dict[str, float]:
        """Share times, and return the `throughput/` metrics that compare ranks; {} for one rank.

        Args:
            own_seconds: result of `Stopwatch.own_seconds`.
        """
        world_size = torch.distributed.get_world_size()
        if world_size == 1:
            return {}
        self._hosts = self._hosts or gather_objects(socket.gethostname())
        seconds = torch.zeros(world_size, dtype=torch.float64, device=device)
        seconds[torch.distributed.get_rank()] = own_seconds
        torch.distributed.all_reduce(seconds)
        slowest = int(seconds.argmax())
        self._ratios = host_ratios(self._hosts, seconds.tolist())
        return {
            "throughput/slowest_rank": slowest,
            "throughput/slowest_rank_seconds": float(seconds[slowest]),
            "throughput/mean_rank_seconds": float(seconds.mean()),
            **(
                {"throughput/slowest_host_ratio": max(self._ratios.values())}
                if self._ratios
                else {}
            ),
        }

    def events(self, now: float) -> list[dict[str, Any]]:
        """Return the fields of a `slow_host` event for each host whose state has changed.

        Args:
            now: seconds on a monotonic clock.
        """
        found = []
        for host, ratio in self._ratios.items():
            recent = self._recent.setdefault(host, deque())
            recent.append((now, ratio))
            while len(recent) > REPORTS and recent[1][0] <= now - SECONDS:
                recent.popleft()
            usual = statistics.median(each for _, each in recent)
            seconds = now - recent[0][0]
            is_known = seconds >= SECONDS and len(recent) >= REPORTS
            if is_known and (usual > SLOWER) != (host in self._slow):
                self._slow ^= {host}
                found.append(
                    {"host": host, "slow": host in self._slow, "ratio": usual, "seconds": seconds}
                )
        return found


def host_ratios(hosts: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    """Return {host: its slowest rank's time, relative to the median of the other hosts' times}.

    A host is missing if it is the only one, or if the median of the others is 0.

    Args:
        hosts, seconds: by rank.
    """
    longest: dict[str, float] = {}
    for host, each in zip(hosts, seconds, strict=True):
        longest[host] = max(each, longest.get(host, 0.0))
    if len(longest) < 2:
        return {}
    medians = {
        host: statistics.median(value for other, value in longest.items() if other != host)
        for host in longest
    }
    return {host: longest[host] / medians[host] for host in longest if medians[host] > 0.0}
