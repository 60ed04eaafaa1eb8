"""The doctor's network check: the run's port, each host's speed, and the expected training speed.

First, each host's fastest exchange is compared with the fastest exchanges of the other hosts, so
that a single bad host is reported and its partners are not. Then pairs of hosts are compared.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from launch.doctor.findings import ALL, NOTE, OK, RED, Finding, merge_hosts
from launch.estimate.measured_hosts import MeasuredHosts
from launch.estimate.this_machine import NETWORK
from zerolm.common.values import shown_bytes
from zerolm.distributed.device import CPU
from zerolm.plan.hardware import recognize

SECONDS = 90.0
GRACE_SECONDS = 30.0  # additional time for imports and process exit
SLOW_SHARE = 0.6  # share of the others' bandwidth; detects that one of two adapters is missing
SLOW_SHARE_OF_CPUS = 0.25  # lower, because exchanges may wait for a core
# A host is slow above this multiple of the others' latency, but never below MIN_LATENCY.
SLOW_LATENCY, MIN_LATENCY = 5.0, 1e-3
MIN_LATENCY_OF_CPUS = 0.02  # higher, because exchanges wait for the scheduler
MIN_BYTES_PER_SECOND = 60e6  # per host: half of 1 Gbit/s
MIN_EXPECTED_SHARE = 0.5  # share of the bandwidth that `plan` assumes
SHOWN_PAIRS, SHOWN_SIZES = 3, 2
OPEN_PORTS = (
    "open all ports between the hosts: ranks listen on arbitrary ones "
    "(net.ipv4.ip_local_port_range)"
)
AskAll = Callable[..., tuple[dict[str, Any], dict[str, str]]]


@dataclass(frozen=True)
class Place:
    """The host, address and port where rank 0 listens."""

    host: str
    address: str
    port: int


def check(
    facts: Mapping[str, Any], ranks: Mapping[str, int], place: Place, ask_all: AskAll
) -> list[Finding]:
    """Let the hosts rendezvous as the ranks of a run will, and measure the network between them.

    Args:
        facts: {host: facts returned by its collector}.
        ranks: {host: number of ranks}.
        place: where rank 0 listens; its port is the run's port if free, else any free port.
        ask_all: a function that takes (name of a request, {host: arguments}), sends the request to
            these hosts, and returns ({host: answer}, {host: problem}).
    """
    names = list(facts)
    if found := _port(names, place, ask_all):
        return found
    requests = {
        name: {"hosts": list(ranks.values()), "number": number, "address": place.address,
               "port": place.port, "seconds": SECONDS}
        for number, name in enumerate(names)
    }  # fmt: skip
    results, problems = ask_all("network", requests)
    for name, of_ranks in results.items():
        errors = [result["error"] for result in of_ranks if "error" in result]
        problems |= {name: errors[0]} if errors else {}
    if problems:
        return _unreachable(facts, ask_all) or _failed(problems, place)
    wrong = [
        Finding("all-reduce", name, RED, "a wrong sum", "test its memory and its network")
        for name, of_ranks in results.items()
        if not all(result["correct"] for result in of_ranks)
    ]
    first = next(iter(facts.values()))["devices"]
    return wrong or measured(results, ranks, first["kind"], first.get("name", ""))


def measured(
    results: Mapping[str, Sequence[Mapping[str, Any]]],
    ranks: Mapping[str, int],
    kind: str,
    device: str,
) -> list[Finding]:
    """Return the findings for a network check in which all measurements succeeded.

    Args:
        results: {host: [result of `network_rank.measure` for each of its ranks]}.
        ranks: {host: number of ranks}.
        kind, device: the devices' kind (such as `cpu`) and name.
    """
    world = sum(ranks.values())
    if world == 1:
        return [Finding("all-reduce", ALL, OK, "1 rank: nothing is sent")]
    found = [
        Finding(name.replace("_", "-"), ALL, OK, f"{world} ranks, {_collective(name, results)}")
        for name in ("all_reduce", "all_gather")
    ]
    if len(ranks) > 1:
        found = _hosts(_pairs(results), ranks, kind, device) + found
    return found


def measured_hosts(
    findings: Sequence[Finding],
    devices: Mapping[str, Any],
    slots: Mapping[str, int],
    ranks: Mapping[str, int],
) -> MeasuredHosts | str:
    """Return the hosts for `zerolm plan --measured`, or why that is not possible.

    Args:
        findings: of `check`.
        devices: facts about the first host's devices.
        slots: {host: number of ranks of the run}.
        ranks: {host: number of ranks in the check}; one on a host without GPUs.
    """
    rates = [each.measured for each in findings if each.measured is not None]
    if not rates:
        return "the links between the hosts were not measured"
    name, known = devices.get("name", ""), recognize(devices.get("name", ""))
    if devices["kind"] != CPU and known is None:
        return f"{name} is not in zerolm/plan/hardware.json. Use --hardware FILE and --inter_node"
    per_host = max(slots.values())
    return {
        "hardware": known.name if known and devices["kind"] != CPU else CPU,
        "devices": sum(slots.values()),
        "devices_per_node": per_host,
        "inter_node": rates[0] * max(ranks.values()) / per_host,
        "hosts": list(slots),
        "date": time.strftime("%Y-%m-%d"),
    }


# ---- Rendezvous


def _port(names: Sequence[str], place: Place, ask_all: AskAll) -> list[Finding]:
    """Check that every other host can reach the port on which rank 0 will listen."""
    others = [name for name in names if name != place.host]
    if not others:
        return []
    _, deaf = ask_all("listen", {place.host: {"port": place.port}})
    if deaf:
        fix = "choose another port: --master_port"
        return [Finding("port", place.host, RED, deaf[place.host], fix)]
    answers, problems = ask_all(
        "connect", {name: {"places": [(place.address, place.port)]} for name in others}
    )
    ask_all("listen", {place.host: {"port": place.port, "stop": True}})
    problems |= {name: answer[0] for name, answer in answers.items() if answer[0]}
    fix = (
        "open the port to all hosts (firewall, security group), choose an open one with "
        "--master_port, or set a reachable address with --master_addr"
    )
    where = f"cannot reach {place.host} at {place.address} port {place.port}, where ranks meet"
    return merge_hosts([
        Finding("port", name, RED, f"{where} ({problem})", fix)
        for name, problem in problems.items()
    ])  # fmt: skip


def _unreachable(facts: Mapping[str, Any], ask_all: AskAll) -> list[Finding]:
    """Return a finding for each host that cannot connect to other hosts on ephemeral ports."""
    ports, _ = ask_all("listen", {name: {"port": 0} for name in facts})
    addresses = {name: next(iter(fact["addresses"]), name) for name, fact in facts.items()}
    targets = {
        name: {other: (addresses[other], port) for other, port in ports.items() if other != name}
        for name in facts
    }
    answers, _ = ask_all(
        "connect", {name: {"places": list(of.values())} for name, of in targets.items()}
    )
    ask_all("listen", {name: {"port": 0, "stop": True} for name in ports})
    found = []
    for name, problems in answers.items():
        failed = [
            f"{other} ({problem})"
            for other, problem in zip(targets[name], problems, strict=True) if problem
        ]  # fmt: skip
        if failed:
            text = f"cannot reach {_some(failed)}, at a port chosen by the system"
            found.append(Finding("all-reduce", name, RED, text, OPEN_PORTS))
    return merge_hosts(found)


def _failed(problems: Mapping[str, str], place: Place) -> list[Finding]:
    fix = "name the interface in .deepspeed_env (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and "
    fix += f"open the ports between the hosts to {place.address}"
    return merge_hosts([
        Finding("all-reduce", name, RED, problem, fix) for name, problem in problems.items()
    ])  # fmt: skip


# ---- Speed


def _collective(name: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return text that lists a collective's sizes, times and bus bandwidths (as in nccl-tests)."""
    every = [result[name] for of_ranks in results.values() for result in of_ranks]
    world, times = len(every), 2 if name == "all_reduce" else 1
    shown = []
    for number, (size, _) in [*enumerate(every[0])][-SHOWN_SIZES:]:
        seconds = max(of_rank[number][1] for of_rank in every)
        rate = size * times * (world - 1) / world / seconds
        shown.append(f"{shown_bytes(size)}: {_shown_seconds(seconds)}, {shown_bytes(rate)}/s")
    return "correct; " + "; ".join(shown)


def _pairs(
    results: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return {(host, other host): (one-way latency in seconds, bytes per second per device)}."""
    names = list(results)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, of_ranks in results.items():
        for result in of_ranks:
            for other, latency, rate in result["pairs"]:
                pairs.setdefault((name, names[other]), []).append((latency, rate))
    return {
        pair: (median(latency for latency, _ in each), sum(rate for _, rate in each) / len(each))
        for pair, each in pairs.items()
    }


def _hosts(
    pairs: Mapping[tuple[str, str], tuple[float, float]],
    ranks: Mapping[str, int],
    kind: str,
    device: str,
) -> list[Finding]:
    names = list(ranks)
    rates = {
        name: max(rate for (one, _), (_, rate) in pairs.items() if one == name) for name in names
    }
    latencies = {
        name: min(late for (one, _), (late, _) in pairs.items() if one == name) for name in names
    }
    found, share, never_late = [], SLOW_SHARE, MIN_LATENCY
    if kind == "cpu":
        share, never_late = SLOW_SHARE_OF_CPUS, MIN_LATENCY_OF_CPUS
    for name in names if len(names) > 2 else []:
        usual = median(rate for other, rate in rates.items() if other != name)
        late = median(latency for other, latency in latencies.items() if other != name)
        fix = "test its cable, switch port and driver (ethtool, ibstat), or leave the host out"
        if rates[name] < share * usual:
            text = f"{shown_bytes(rates[name])}/s per device to its fastest peer; the others reach"
            found.append(Finding("network", name, RED, f"{text} {shown_bytes(usual)}/s", fix))
        elif latencies[name] > max(SLOW_LATENCY * late, never_late):
            text = (
                f"{_shown_seconds(latencies[name])} for a few bytes to its best peer; others need"
            )
            found.append(Finding("network", name, RED, f"{text} {_shown_seconds(late)}", fix))
    slow = {finding.host for finding in found}
    links = [
        f"{one} and {other} ({shown_bytes(rate)}/s per device)"
        for (one, other), (_, rate) in pairs.items()
        if one < other and not {one, other} & slow
        and rate < share * min(rates[one], rates[other])
    ]  # fmt: skip
    if links:
        text = f"slow between {_some(links)}, but not to other hosts"
        found.append(Finding("network", ALL, RED, text, "test the switches between them"))
    return found or [_speed(rates, max(latencies.values()), ranks, kind, device)]


def _speed(
    rates: Mapping[str, float], latency: float, ranks: Mapping[str, int], kind: str, device: str
) -> Finding:
    """Return a finding for the slowest host's bandwidth, in the unit of `plan --inter_node`."""
    slowest = min(rates, key=lambda name: rates[name])
    rate, of_host = rates[slowest], rates[slowest] * ranks[slowest]
    text = f"{shown_bytes(rate)}/s per device between hosts, {_shown_seconds(latency)} for a few "
    text += f"bytes: zerolm plan --inter_node {rate:.3g}"
    known = recognize(device)
    assumed = NETWORK / ranks[slowest] if kind == "cpu" else known.inter_node if known else None
    if assumed is not None:
        text += f" (assumed without it: {assumed:.3g})"
    if of_host < MIN_BYTES_PER_SECOND:
        fix = f"find out which network is used and why (ethtool), or train only on {slowest}"
        return Finding("network", ALL, RED, f"{text}: below half of 1 Gbit/s", fix, rate)
    if assumed is not None and rate < MIN_EXPECTED_SHARE * assumed:
        fix = "check which network is used (NCCL_DEBUG=INFO), and run that plan for its cost"
        return Finding("network", ALL, NOTE, text, fix, rate)
    return Finding("network", ALL, OK, text, measured=rate)


def _shown_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _some(shown: Sequence[str]) -> str:
    more = f" and {len(shown) - SHOWN_PAIRS} more" if len(shown) > SHOWN_PAIRS else ""
    return ", ".join(shown[:SHOWN_PAIRS]) + more
