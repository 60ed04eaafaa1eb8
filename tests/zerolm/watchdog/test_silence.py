"""Ranks of other hosts that have ceased, by heartbeats that do not change."""

import os
import socket
from unittest.mock import Mock

import pytest

from zerolm.watchdog import silence

PEERS = {
    1: {"host": "node1", "machine": "a"},
    2: {"host": "node2", "machine": "b"},
    3: {"host": "node2", "machine": "b"},
    4: {"host": "node3", "machine": "c"},
}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(silence.time, "monotonic", lambda: now[0])
    return now


def test_a_heartbeat_ages_until_it_changes(clock, tmp_path):
    beats = {rank: {"monotonic": 1.0, "state": "running"} for rank in (1, 2, 3)}
    beats[3]["state"] = "ended"
    for rank in beats:
        (tmp_path / str(rank)).touch()
    ages = silence.Ages(beats.get, lambda rank: tmp_path / str(rank))
    assert ages.look([1, 2, 3, 4]) == {1: 0, 2: 0}, "ended, and without a heartbeat"
    clock[0] += 5
    beats[1]["monotonic"] = 2.0
    assert ages.look([1, 2]) == {1: 0, 2: 5}
    clock[0] += 5
    assert ages.look([1, 2]) == {1: 5, 2: 10}
    stamp = (tmp_path / "2").stat().st_mtime_ns + 10**9
    os.utime(tmp_path / "2", ns=(stamp, stamp))  # what a rank does on a full disk
    assert ages.look([1, 2]) == {1: 5, 2: 0}


def test_a_host_is_named_if_all_of_its_ranks_are_silent():
    found = silence.accounts({2: 9.2, 3: 8.8}, PEERS, machine="a")
    assert found[2].startswith("has been silent for 9 s (all ranks on node2): the host has")
    found = silence.accounts({2: 9.2}, PEERS, machine="a")
    assert found == {2: "has been silent for 9 s"}, "another rank on its host works"
    assert "(the only rank on node3)" in silence.accounts({4: 9}, PEERS, machine="a")[4]
    assert silence.accounts({1: 9}, PEERS, machine="a") == {1: "has been silent for 9 s"}, (
        "own host"
    )


def test_addresses_in_an_error_are_those_of_hosts(monkeypatch):
    table = {"node1": "10.0.0.1", "node2": "10.0.0.2"}

    def resolve(host, *rest, **more):
        if host not in table:
            raise socket.gaierror(host)
        six = f"fe80::{table[host][-1]}"
        return [(None, None, 0, "", (address, 0)) for address in (table[host], six)]

    monkeypatch.setattr(silence.socket, "getaddrinfo", resolve)
    error = "Connection closed by peer [10.0.0.2]:37945"
    assert silence.named_peers(error, PEERS) == "10.0.0.2 is node2 (rank 2, 3)"
    assert silence.named_peers("Connection reset", PEERS) == ""
    assert silence.named_peers("[10.0.0.9]:1: refused", PEERS) == ""
    for written in ("10.0.0.2<50422>", "node2.cluster<50422>", "fe80::2%eth0<50422>",
                    "[fe80::2]:50422", "[fe80::2%eth0]:50422"):  # fmt: skip
        error = f"Last error:\nsocketProgress: Connection closed by remote peer {written}"
        assert silence.named_peers(error, PEERS).endswith("node2 (rank 2, 3)"), written


def test_ranks_of_other_hosts_are_looked_at_while_this_one_still_beats(monkeypatch, tmp_path):
    monkeypatch.setattr(silence, "DIAGNOSIS_SECONDS", 0.0)
    monkeypatch.setattr(silence, "FOLLOW_SECONDS", 0.0)
    for rank in PEERS:
        (tmp_path / str(rank)).touch()
    beats = {rank: {"monotonic": 1.0, "state": "running"} for rank in PEERS}
    written = []

    def write():
        written.append(1)
        beats[4] = {"monotonic": float(len(written)), "state": "running"}  # node3 works

    own = Mock(seconds=0.05, machine="a", read=beats.get, write=write)
    own.files.heartbeat = lambda rank: tmp_path / str(rank)
    found = silence.ceased(own, PEERS, leads_machine=True)
    assert sorted(found) == [2, 3] and "all ranks on node2" in found[2] and len(written) > 4
    assert silence.ceased(own, PEERS, leads_machine=False) == {}
