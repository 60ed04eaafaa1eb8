"""Compare the facts from all hosts, and return a finding for each problem.

A host whose value differs from the most frequent one is considered at fault; ties are resolved in
favor of the first host. No side effects.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.doctor.findings import ALL, NOTE, OK, RED, Finding, from_problem, merge_hosts
from launch.doctor.requirements import Requirements
from zerolm.common.values import shown_bytes
from zerolm.preflight.host import shared_memory_problem

PACKAGES = ("python", "torch", "deepspeed", "transformers", "zerolm")
MAX_SKEW_SECONDS = 5.0  # each host computes the age of other hosts' heartbeats
MIN_BYTES_PER_SECOND = 20e6
MIN_SAMPLE_BYTES = 8 << 20  # a smaller sample is too short to measure a disk's speed
MAX_NAMES = 3
Facts = Mapping[str, Mapping[str, Any]]  # {host: what its collector returned}


def run_checks(facts: Facts, required: Requirements) -> list[Finding]:
    """Run all checks in the order of `CHECKS`, and return their findings.

    A check without problems or notes contributes only its first finding.
    """
    findings: list[Finding] = []
    for check in CHECKS:
        found = check(facts, required)
        findings += found if any(finding.state != OK for finding in found) else found[:1]
    return findings


def outliers(values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return (the most frequent value, the hosts with a different value).

    If several values are equally frequent, the first one is used.
    """
    counts = Counter(repr(value) for value in values.values())
    largest = counts.most_common(1)[0][1]
    usual = next(value for value in values.values() if counts[repr(value)] == largest)
    return usual, [host for host, value in values.items() if value != usual]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


# -------------------------------------------------------------------------------------------------
# The checks, in the order of the table


def _settings(facts: Facts, required: Requirements) -> list[Finding]:
    red = [
        Finding("settings", host, RED, problem)
        for host, fact in facts.items() for problem in fact["problems"]
    ]  # fmt: skip
    return merge_hosts(red) or [Finding("settings", ALL, OK, "can be read")]


def _versions(facts: Facts, required: Requirements) -> list[Finding]:
    found = []
    for package in PACKAGES:
        usual, odd = outliers({host: fact["versions"].get(package) for host, fact in facts.items()})
        for host in odd:
            here = facts[host]["versions"].get(package, "none")
            fix = f"install {package} {usual} there" if package != "python" else f"use {usual}"
            found.append(
                Finding("versions", host, RED, f"{package} {here}, the others have {usual}", fix)
            )
    first = next(iter(facts.values()))["versions"]
    text = ", ".join(f"{name} {first[name]}" for name in PACKAGES if name in first)
    return found or [Finding("versions", ALL, OK, text)]


def _code(facts: Facts, required: Requirements) -> list[Finding]:
    found = []
    usual, odd = outliers({host: fact["code"] for host, fact in facts.items()})
    for host in odd:
        there = facts[host]["code"]
        names = sorted(name for name in {*usual, *there} if usual.get(name) != there.get(name))
        text = f"{_shown(names)} differ from the other hosts'"
        found.append(Finding("code", host, RED, text, "copy them there"))
    usual, odd = outliers({host: fact["configs"] for host, fact in facts.items()})
    for host in odd:
        there = facts[host]["configs"]
        names = sorted(name for name in usual if usual[name] != there.get(name))
        text = "is not there" if None in (there.get(name) for name in names) else "differs"
        found.append(Finding("configs", host, RED, f"{_shown(names)} {text}", "copy it there"))
    commit = next(iter(facts.values()))["commit"] or "not a git checkout"
    return found or [Finding("code", ALL, OK, f"the same, {commit}")]


def _data(facts: Facts, required: Requirements) -> list[Finding]:
    found = merge_hosts([
        Finding("data", host, RED, problem)
        for host, fact in facts.items() for problem in fact["data"]["problems"]
    ])  # fmt: skip
    paths = sorted({path for fact in facts.values() for path in fact["data"]["sources"]})
    for path in paths:
        sources = {
            host: fact["data"]["sources"][path]
            for host, fact in facts.items() if path in fact["data"]["sources"]
        }  # fmt: skip
        fix = f"find the damaged copy with zerolm data verify {path} and replace it"
        _, odd = outliers({host: source["fingerprint"] for host, source in sources.items()})
        for host in odd:
            text = f"{path}: its manifest differs from the other hosts'"
            found.append(Finding("data", host, RED, text, fix))
        shards = {host: source["shards"] for host, source in sources.items() if host not in odd}
        usual, odd = outliers(shards)
        for host in odd:
            names = [name for name in usual if usual[name] != shards[host].get(name)]
            text = f"{path}: {_shown(names)}: contents differ from the other hosts'"
            found.append(Finding("data", host, RED, text, fix))
    if not paths:
        return found or [Finding("data", ALL, NOTE, "none given", "add --data after the --")]
    how = "every checksum" if required.deep else "manifests and samples; --deep reads everything"
    return found or [Finding("data", ALL, OK, f"the same, {len(paths)} source(s) ({how})")]


def _devices(facts: Facts, required: Requirements) -> list[Finding]:
    found = []
    kind, odd = outliers({host: fact["devices"]["kind"] for host, fact in facts.items()})
    for host in odd:
        text = f"{facts[host]['devices']['kind']}, the others have {kind}"
        found.append(Finding("devices", host, RED, text, "repair its driver, or leave it out"))
    for host, fact in facts.items():
        count, slots = fact["devices"]["count"], required.slots[host]
        unit = "core" if fact["devices"]["kind"] == "cpu" else "device"
        if count < slots:
            fix = f"write slots={count}, or find out why the others are not visible (nvidia-smi)"
            text = f"{count} {unit}(s), but the hostfile sets slots={slots}"
            found.append(Finding("devices", host, RED, text, fix))
        for busy in fact["devices"]["busy"]:
            fix = "end the process that uses it (nvidia-smi), or leave the host out"
            found.append(Finding("devices", host, RED, busy, fix))
    total = sum(required.slots[host] for host in facts)
    return found or [Finding("devices", ALL, OK, f"{total} x {kind}, free")]


def _clock(facts: Facts, required: Requirements) -> list[Finding]:
    offsets = {host: fact["clock"] for host, fact in facts.items()}
    median = sorted(offset for offset, _ in offsets.values())[(len(offsets) - 1) // 2]
    found = [
        Finding("clock", host, RED, f"{offset - median:+.1f} s off the others", "run chrony there")
        for host, (offset, uncertainty) in offsets.items()
        if abs(offset - median) - uncertainty > MAX_SKEW_SECONDS
    ]  # fmt: skip
    spread = max(abs(offset - median) for offset, _ in offsets.values())
    return found or [Finding("clock", ALL, OK, f"within {spread:.2f} s")]


def _disk(facts: Facts, required: Requirements) -> list[Finding]:
    found, free = [], []
    size = required.checkpoint_bytes or 0
    for host, fact in facts.items():
        disk = fact["disk"]
        if not disk:
            return [Finding("disk", ALL, NOTE, "no --run_dir given", "add it after the --")]
        if disk["problem"]:
            found.append(Finding("disk", host, RED, disk["problem"]))
        elif disk["free"] >= 0:
            free.append(disk["free"])
            needed = disk["checkpoints"] * size
            if disk["free"] < needed:
                text = f"{shown_bytes(disk['free'])} free, {disk['checkpoints']} checkpoint(s) need"
                fix = "free some, choose another --run_dir, or lower --checkpoint_keep"
                found.append(Finding("disk", host, RED, f"{text} {shown_bytes(needed)}", fix))
    smallest = shown_bytes(min(free)) if free else "unknown"
    need = f", a checkpoint needs {shown_bytes(size)}" if size else ""
    return found or [Finding("disk", ALL, OK, f"{smallest} free{need}")]


def _shared_memory(facts: Facts, required: Requirements) -> list[Finding]:
    found, free = [], []
    for host, fact in facts.items():
        if fact["shared_memory"] is None:
            found.append(Finding("/dev/shm", host, RED, "does not exist", "mount a tmpfs there"))
            continue
        free.append(fact["shared_memory"][0])
        problem = shared_memory_problem(free[-1], required.slots[host])
        if problem:
            found.append(from_problem("/dev/shm", host, problem))
    return found or [Finding("/dev/shm", ALL, OK, f"{shown_bytes(min(free))} free")]


def _port(facts: Facts, required: Requirements) -> list[Finding]:
    host, fact = next(iter(facts.items()))
    if fact["port"]:
        return [from_problem("port", host, fact["port"])]
    return [Finding("port", host, OK, "rank 0 can listen")]


def _operators(facts: Facts, required: Requirements) -> list[Finding]:
    found, names = [], []
    for host, fact in facts.items():
        names = list(required.operators(fact["devices"]["kind"]))
        not_built = [name for name in names if name not in fact["operators"]["built"]]
        missing = fact["operators"]["missing"]
        text = f"{', '.join(not_built)}: not built"
        if not_built and missing:
            text += f", and building needs {' and '.join(missing)}"
            found.append(Finding("operators", host, RED, text, "install it"))
        elif not_built:
            text += "; the first start takes some minutes longer"
            fix = "start the run on one host first"
            found.append(Finding("operators", host, NOTE, text, fix))
    text = ", ".join(names) + " built" if names else "none needed"
    return found or [Finding("operators", ALL, OK, text)]


def _storage(facts: Facts, required: Requirements) -> list[Finding]:
    found, rates = [], []
    for host, fact in facts.items():
        samples = fact["data"]["sources"].values()
        size, seconds = (sum(sample[key] for sample in samples) for key in ("bytes", "seconds"))
        if size < MIN_SAMPLE_BYTES:
            continue
        rates.append(size / max(seconds, 1e-9))
        if rates[-1] < MIN_BYTES_PER_SECOND:
            text = f"shards are read at {shown_bytes(rates[-1])}/s"
            fix = "copy them to a local disk, or find out what else is using the storage"
            found.append(Finding("storage", host, RED, text, fix))
    text = "too little data to measure the read speed"
    if rates:
        text = f"shards are read at {shown_bytes(min(rates))}/s or faster"
    return found or [Finding("storage", ALL, OK, text)]


CHECKS: tuple[Callable[[Facts, Requirements], list[Finding]], ...] = (
    _settings, _versions, _code, _data, _devices, _clock, _disk, _shared_memory, _port,
    _operators, _storage,
)  # fmt: skip
