"""What the doctor says of measured networks: the slow host and the slow pair, of many."""

import json
from itertools import combinations

import pytest

from launch.doctor.findings import ALL, NOTE, OK, RED, Finding
from launch.doctor.network import measured, measured_hosts
from launch.doctor.network_rank import MAX_PARTNERS, partner_rounds
from tests.launching import free_port, run_workers

LATENCY, RATE = 50e-6, 40e9


def lines_about_the_network(
    num_hosts: int, pairs: dict[tuple[int, int], tuple[float, float]], rate: float = RATE
) -> list[Finding]:
    """Return the lines for hosts of two H100 each; `pairs` differ from the others."""
    names = [f"node{number}" for number in range(num_hosts)]
    times = {"all_reduce": [(1 << 24, 1e-3)], "all_gather": [(1 << 24, 1e-3)], "correct": True}
    results: dict[str, list] = {name: [] for name in names}
    for number, name in enumerate(names):
        others = [partners[number] for partners in partner_rounds(num_hosts)]
        measurements = [
            (other, *pairs.get((min(number, other), max(number, other)), (LATENCY, rate)))
            for other in others if other != number
        ]  # fmt: skip
        results[name] = [{**times, "pairs": measurements}] * 2
    found = measured(results, dict.fromkeys(names, 2), "cuda", "NVIDIA H100 80GB HBM3")
    return [line for line in found if line.check == "network"]


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 7, 64])
def test_partners_are_disjoint_pairs_and_all_pairs_of_few_hosts(num_hosts):
    rounds = list(partner_rounds(num_hosts))
    for partners in rounds:
        assert all(partners[partner] == host for host, partner in enumerate(partners))
    pairs = {
        (host, other) for partners in rounds for host, other in enumerate(partners) if host < other
    }
    if num_hosts <= MAX_PARTNERS:
        assert pairs == set(combinations(range(num_hosts), 2))
    else:
        assert len(rounds) == MAX_PARTNERS and len(pairs) == MAX_PARTNERS * num_hosts // 2


@pytest.mark.parametrize("num_hosts", [3, 4, 64])
@pytest.mark.parametrize("slow", [0, 2])
def test_one_slow_host_is_named_and_not_those_that_exchange_with_it(num_hosts, slow):
    others = {(min(slow, other), max(slow, other)) for other in range(num_hosts) if other != slow}
    (line,) = lines_about_the_network(num_hosts, dict.fromkeys(others, (LATENCY, RATE / 8)))
    assert (line.host, line.state) == (f"node{slow}", RED)
    assert "4.66 GiB/s per device to its fastest peer; the others reach 37.3 GiB/s" in line.fact
    (line,) = lines_about_the_network(num_hosts, dict.fromkeys(others, (0.02, RATE)))
    assert (line.host, line.state) == (f"node{slow}", RED)
    assert "20 ms for a few bytes to its best peer; others need 50 us" in line.fact


def test_one_slow_link_is_named_by_its_two_hosts():
    (line,) = lines_about_the_network(4, {(1, 3): (LATENCY, RATE / 8)})
    assert (line.host, line.state) == (ALL, RED)
    assert (
        "slow between node1 and node3 (4.66 GiB/s per device), but not to other hosts" in line.fact
    )


def test_equal_hosts_have_the_bandwidth_in_the_unit_of_the_plan():
    (line,) = lines_about_the_network(4, {})
    assert line.state == OK
    assert "zerolm plan --inter_node 4e+10 (assumed without it: 5e+10)" in line.fact
    (line,) = lines_about_the_network(4, {}, rate=2e10)
    assert line.state == NOTE and "--inter_node 2e+10 (assumed without it: 5e+10)" in line.fact
    (line,) = lines_about_the_network(2, {}, rate=2.5e6)
    assert line.state == RED and "below half of 1 Gbit/s" in line.fact


def test_measured_links_are_those_of_a_rank_of_the_run():
    """Of a CPU's host one rank measures what the ranks of the run share."""
    (line,) = lines_about_the_network(4, {}, rate=2e10)
    slots = {f"node{number}": 8 for number in range(4)}
    of_gpus = {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3"}
    found = measured_hosts([line], of_gpus, slots, slots)
    assert found | {"date": ""} == {
        "hardware": "H100", "devices": 32, "devices_per_node": 8, "inter_node": 2e10,
        "hosts": list(slots), "date": "",
    }  # fmt: skip
    found = measured_hosts([line], {"kind": "cpu"}, slots, dict.fromkeys(slots, 1))
    assert (found["hardware"], found["inter_node"]) == ("cpu", 2e10 / 8)
    unknown = {"kind": "cuda", "name": "A device of next year"}
    assert "A device of next year is not in" in measured_hosts([line], unknown, slots, slots)
    assert "not measured" in measured_hosts([], of_gpus, slots, slots)


RANK = """
import contextlib, sys
from launch.doctor import network_rank
directory, rank, *flags = sys.argv[1:]
with open(f"{directory}/{rank}", "w") as file, contextlib.redirect_stdout(file):
    network_rank.main(["--rank", rank, "--local_rank", str(int(rank == "2")), *flags])
"""


def test_ranks_of_several_hosts_measure_collectives_and_exchanges(tmp_path):
    """Three hosts of one, two and one ranks, all on this machine."""
    (tmp_path / "rank.py").write_text(RANK)
    flags = ["--hosts", "1,2,1", "--address", "127.0.0.1", "--port", free_port()]
    run_workers(4, tmp_path / "rank.py", tmp_path, "{rank}", *flags, timeout=100)
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert all(result["correct"] for result in results)
    partners = [{other for other, *_ in result["pairs"]} for result in results]
    assert partners == [{1, 2}, {0, 2}, set(), {0, 1}], "the second rank has no partner elsewhere"
    for result in results:
        assert all(seconds > 0 and rate > 0 for _, seconds, rate in result["pairs"])
        for name in ("all_reduce", "all_gather"):
            sizes = [size for size, _ in result[name]]
            assert len(sizes) >= 2 and sizes == [1 << 20, 16 << 20, 256 << 20][: len(sizes)]
