"""Ranks of other hosts that have ceased, by heartbeats that do not change."""

import os
import socket

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
    assert found[2].startswith("has been silent for 9 s, as all ranks on node2: the host has")
    found = silence.accounts({2: 9.2}, PEERS, machine="a")
    assert found == {2: "has been silent for 9 s"}, "another rank on its host works"
    assert "as the only rank on node3" in silence.accounts({4: 9}, PEERS, machine="a")[4]
    assert silence.accounts({1: 9}, PEERS, machine="a") == {1: "has been silent for 9 s"}, (
        "own host"
    )


def test_addresses_in_an_error_are_those_of_hosts(monkeypatch):
    table = {"node1": "10.0.0.1", "node2": "10.0.0.2"}

    def resolve(host, *rest):
        if host not in table:
            raise socket.gaierror(host)
        return [(None, None, 0, "", (table[host], 0))]

    monkeypatch.setattr(silence.socket, "getaddrinfo", resolve)
    error = "Connection closed by peer [10.0.0.2]:37945"
    assert silence.named_peers(error, PEERS) == "10.0.0.2 is node2 (rank 2, 3)"
    assert silence.named_peers("Connection reset", PEERS) == ""
    assert silence.named_peers("[10.0.0.9]:1: refused", PEERS) == ""
