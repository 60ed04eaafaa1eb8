"""Which ranks of other hosts have ceased: their heartbeats do not change any more.

The error of a collective is a symptom: it names the host of the rank that raises it, while the
cause is a rank on another host that was killed, or a host that has failed. Clocks of different
hosts are never compared.
"""

import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerolm.watchdog.heartbeats import Heartbeats
from zerolm.watchdog.progress import Heartbeat

PEER = (
    re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"),
    re.compile(r"\[([0-9a-f:]+)[%\w]*\]:\d"),  # an IPv6 address and a port
    re.compile(r"([\w.:-]+)(?:%\w+)?<\d+>"),  # as NCCL writes a peer
)
NCCL_ERROR = re.compile(r"Last error:\s*(.+)")
MAX_NAMED = 8
DIAGNOSIS_SECONDS = 8.0  # for the cause of an error in a collective to be found
FOLLOW_SECONDS = 4.0  # further time, for the rank of this machine that looks
CEASED_BEATS = 3  # heartbeats that a rank of another host has missed when it has ceased
Peers = Mapping[int, Mapping[str, Any]]  # identities of the other ranks


class Ages:
    """How long the heartbeats of other ranks have been the same, while this object has looked.

    Args:
        read: returns the heartbeat of a rank. It opens the file, whose attributes alone may be a
            minute old on a network file system.
        path: returns the file, which a rank only touches while the disk is full.
    """

    def __init__(self, read: Callable[[int], Heartbeat | None], path: Callable[[int], Path]):
        self._read, self._path = read, path
        self._seen: dict[int, tuple[object, float]] = {}  # (times of the file, when they were new)

    def look(self, ranks: Iterable[int]) -> dict[int, float]:
        """Return {rank: seconds without a new heartbeat} of the ranks that have not ended."""
        now = time.monotonic()
        quiet = {}
        for rank in ranks:
            beat = self._read(rank)
            if beat is None or beat["state"] != "running":
                continue
            with suppress(OSError):
                times = beat["monotonic"], self._path(rank).stat().st_mtime_ns
                if self._seen.get(rank, (None,))[0] != times:
                    self._seen[rank] = (times, now)
            if rank not in self._seen:
                continue
            quiet[rank] = now - self._seen[rank][1]
        return quiet


def ceased(heartbeats: Heartbeats, peers: Peers, leads_machine: bool) -> dict[int, str]:
    """Return {rank of another host: what is known about it} of those that have ceased.

    Takes `DIAGNOSIS_SECONDS`, in which the thread of the watchdog may find another cause and end
    this process.

    Args:
        leads_machine: whether this rank looks; the others of its machine leave it the time to.
    """
    beat = heartbeats.seconds
    remote = [
        rank for rank, peer in peers.items()
        if leads_machine and peer["machine"] != heartbeats.machine
    ]  # fmt: skip
    deadline = time.monotonic() + max(DIAGNOSIS_SECONDS, (CEASED_BEATS + 1) * beat)
    ages = Ages(heartbeats.read, heartbeats.files.heartbeat)
    quiet = ages.look(remote)
    while time.monotonic() < deadline:
        time.sleep(beat / 2)
        heartbeats.write()  # this may be the thread that does it otherwise
        quiet = ages.look(remote)
    if not leads_machine:
        time.sleep(FOLLOW_SECONDS)
    silent = {rank: seconds for rank, seconds in quiet.items() if seconds > CEASED_BEATS * beat}
    return accounts(silent, peers, heartbeats.machine)


def accounts(silent: Mapping[int, float], peers: Peers, machine: str) -> dict[int, str]:
    """Return {silent rank: what is known about it}, from its seconds without a heartbeat.

    Args:
        machine: this rank's own, which works.
    """
    found = {}
    for rank, seconds in silent.items():
        peer = peers[rank]
        others = [each for each in peers if peers[each]["machine"] == peer["machine"]]
        found[rank] = f"has been silent for {seconds:.0f} s"
        if peer["machine"] != machine and set(others) <= silent.keys():
            found[rank] += (
                f", as {'all ranks' if len(others) > 1 else 'the only rank'} on {peer['host']}: "
                f"the host has failed or is cut off, or its processes were killed or suspended"
            )
    return found


def named_peers(error: str, peers: Peers) -> str:
    """Return which hosts the error of a collective names, as a clause; may be empty.

    gloo and libuv write `[10.0.0.2]:50000`, NCCL `10.0.0.2<50000>`, `fe80::2%eth0<50000>` or
    `node2<50000>`.
    """
    named = {found for pattern in PEER for found in pattern.findall(error)}
    hosts: dict[str, list[int]] = {}
    for rank, peer in peers.items():
        hosts.setdefault(peer["host"], []).append(rank)
    clauses = []
    for host, ranks in hosts.items():
        own = {name for name in named if _short(name) == _short(host)}
        if named and (known := own or named & _addresses(host)):
            is_host = "" if own else f"{', '.join(sorted(known))} is "
            clauses.append(f"{is_host}{host} (rank {_numbers(ranks)})")
    return "; ".join(clauses)


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def _numbers(ranks: Collection[int]) -> str:
    more = f" ... ({len(ranks)} ranks)" if len(ranks) > MAX_NAMED else ""
    return ", ".join(map(str, sorted(ranks)[:MAX_NAMED])) + more


def _addresses(host: str) -> set[str]:
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return {str(address[0]) for *_, address in found}
    return set()
