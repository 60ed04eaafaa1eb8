"""Find ranks on other hosts that have ceased, which means that their heartbeats no longer change.

An error in a collective is only a symptom. It is raised by a working rank, but its cause may be a
killed rank on another host or a failed host. Clocks of different hosts are never compared.
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
    re.compile(r"([\w.:-]+)(?:%\w+)?<\d+>"),  # a peer as written by NCCL
)
NCCL_ERROR = re.compile(r"Last error:\s*(.+)")
MAX_NAMED = 8
DIAGNOSIS_SECONDS = 8.0  # time to find the cause of an error in a collective
FOLLOW_SECONDS = 4.0  # additional time for the rank that does the check for this machine
CEASED_BEATS = 3  # a rank on another host has ceased after missing this many heartbeats
Peers = Mapping[int, Mapping[str, Any]]  # identities of the other ranks


class Ages:
    """Measures how long the heartbeats of other ranks have not changed while being observed.

    Args:
        read: returns a rank's heartbeat. It must open the file, since on a network file system the
            attributes of an unopened file may be a minute old.
        path: returns the path of a rank's heartbeat file, which the rank only touches while the
            disk is full.
    """

    def __init__(self, read: Callable[[int], Heartbeat | None], path: Callable[[int], Path]):
        self._read, self._path = read, path
        self._seen: dict[
            int, tuple[object, float]
        ] = {}  # {rank: (times, when they were first seen)}

    def look(self, ranks: Iterable[int]) -> dict[int, float]:
        """Return {rank: seconds without a new heartbeat} for those ranks that have not ended."""
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
    """Return {rank: description of its silence} for ranks on other hosts that have ceased.

    Takes at least `DIAGNOSIS_SECONDS`, during which the watchdog's thread may find another cause
    and end this process.

    Args:
        leads_machine: whether this rank does the check for its machine; if not, it only waits.
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
        heartbeats.write()  # the watchdog's thread usually writes it, but may be in this loop
        quiet = ages.look(remote)
    if not leads_machine:
        time.sleep(FOLLOW_SECONDS)
    silent = {rank: seconds for rank, seconds in quiet.items() if seconds > CEASED_BEATS * beat}
    return accounts(silent, peers, heartbeats.machine)


def accounts(silent: Mapping[int, float], peers: Peers, machine: str) -> dict[int, str]:
    """Return {rank: description of its silence} for silent ranks.

    Args:
        silent: {rank: seconds without a heartbeat}.
        machine: ID of this rank's machine, which has not failed.
    """
    found = {}
    for rank, seconds in silent.items():
        peer = peers[rank]
        others = [each for each in peers if peers[each]["machine"] == peer["machine"]]
        found[rank] = f"has been silent for {seconds:.0f} s"
        if peer["machine"] != machine and set(others) <= silent.keys():
            found[rank] += (
                f" ({'all ranks' if len(others) > 1 else 'the only rank'} on {peer['host']}): "
                f"the host has failed or is cut off, or its processes were killed or suspended"
            )
    return found


def named_peers(error: str, peers: Peers) -> str:
    """Return a clause that lists the hosts named in a collective's error; "" if none are named.

    Gloo and libuv write `[10.0.0.2]:50000`; NCCL writes `10.0.0.2<50000>`, `fe80::2%eth0<50000>` or
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
