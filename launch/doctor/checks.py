"""What the doctor concludes: facts of all hosts in, a line for each thing that is wrong out. Pure.

A host differs when it is not like most of them, or like the first where there is no majority.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerolm.resources import shared_memory_problem
from zerolm.values import shown_bytes

OK, NOTE, RED = "ok", "note", "RED"
ALL = "all"
PACKAGES = ("python", "torch", "deepspeed", "transformers", "zerolm")
SKEW_SECONDS = 5.0  # heartbeats and stale locks are judged by the clocks of several hosts
SLOW_BYTES_PER_SECOND = 20e6
SLOW_FROM_BYTES = 8 << 20  # a smaller sample says nothing about a disk
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        check: what was looked at.
        host: `all`, or the one that it is about.
        state: OK, NOTE or RED.
        what: the fact.
        fix: what to do about it.
    """

    check: str
    host: str
    state: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Run:
    """What the run asks of the hosts.

    Attributes:
        slots: {host: ranks on it}.
        checkpoint_bytes: of one checkpoint; None: not known.
        operators: DeepSpeed's operators that the profile uses, for each kind of device.
        deep: whether every shard was checked.
    """

    slots: Mapping[str, int]
    checkpoint_bytes: int | None
    operators: Callable[[str], Sequence[str]]
    deep: bool


def odd_ones(values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return (the value of most hosts, those with another); the first host's where two tie."""
    counts = Counter(repr(value) for value in values.values())
    most = counts.most_common(1)[0][1]
    usual = next(value for value in values.values() if counts[repr(value)] == most)
    return usual, [host for host, value in values.items() if value != usual]


def compare(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    """Return the findings of every check, those of one check together."""
    findings: list[Finding] = []
    for check in CHECKS:
        found = check(facts, run)
        findings += found if any(one.state != OK for one in found) else found[:1]
    return findings


# -------------------------------------------------------------------------------------------------
# The checks, in the order of the table


def _settings(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    red = [
        Finding("settings", host, RED, problem)
        for host, fact in facts.items() for problem in fact["problems"]
    ]  # fmt: skip
    return _once(red) or [Finding("settings", ALL, OK, "can be read")]


def _versions(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found = []
    for package in PACKAGES:
        usual, odd = odd_ones({host: fact["versions"].get(package) for host, fact in facts.items()})
        for host in odd:
            here = facts[host]["versions"].get(package, "none")
            fix = f"install {package} {usual} there" if package != "python" else f"use {usual}"
            found.append(
                Finding("versions", host, RED, f"{package} {here}, the others have {usual}", fix)
            )
    shown = next(iter(facts.values()))["versions"]
    text = ", ".join(f"{name} {shown[name]}" for name in PACKAGES if name in shown)
    return found or [Finding("versions", ALL, OK, text)]


def _code(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found = []
    usual, odd = odd_ones({host: fact["code"] for host, fact in facts.items()})
    for host in odd:
        there = facts[host]["code"]
        names = sorted(name for name in {*usual, *there} if usual.get(name) != there.get(name))
        found.append(
            Finding("code", host, RED, f"{_some(names)} differ from the others'", "copy them there")
        )
    usual, odd = odd_ones({host: fact["configs"] for host, fact in facts.items()})
    for host in odd:
        there = facts[host]["configs"]
        names = sorted(name for name in usual if usual[name] != there.get(name))
        what = "is not there" if None in (there.get(name) for name in names) else "differs"
        found.append(Finding("configs", host, RED, f"{_some(names)} {what}", "copy it there"))
    commit = next(iter(facts.values()))["commit"] or "not a git checkout"
    return found or [Finding("code", ALL, OK, f"the same, {commit}")]


def _data(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found = _once([
        Finding("data", host, RED, problem)
        for host, fact in facts.items() for problem in fact["data"]["problems"]
    ])  # fmt: skip
    named = sorted({path for fact in facts.values() for path in fact["data"]["sources"]})
    for path in named:
        here = {
            host: fact["data"]["sources"][path]
            for host, fact in facts.items() if path in fact["data"]["sources"]
        }  # fmt: skip
        fix = f"copy it again; python -m data_prep verify {path} tells whose is right"
        _, odd = odd_ones({host: source["fingerprint"] for host, source in here.items()})
        for host in odd:
            text = f"{path}: other data than the others have, by its manifest"
            found.append(Finding("data", host, RED, text, fix))
        same = {host: source["shards"] for host, source in here.items() if host not in odd}
        usual, odd = odd_ones(same)
        for host in odd:
            names = [name for name in usual if usual[name] != same[host].get(name)]
            text = f"{path}: {_some(names)}: other bytes than the others have"
            found.append(Finding("data", host, RED, text, fix))
    if not named:
        return found or [Finding("data", ALL, NOTE, "none was named", "add --data behind the --")]
    how = "every checksum" if run.deep else "manifests and samples; --deep reads everything"
    return found or [Finding("data", ALL, OK, f"the same, {len(named)} source(s) ({how})")]


def _devices(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found = []
    kind, odd = odd_ones({host: fact["devices"]["kind"] for host, fact in facts.items()})
    for host in odd:
        text = f"{facts[host]['devices']['kind']}, the others have {kind}"
        found.append(Finding("devices", host, RED, text, "mend its driver, or leave it out"))
    for host, fact in facts.items():
        count, slots = fact["devices"]["count"], run.slots[host]
        what = "core" if fact["devices"]["kind"] == "cpu" else "device"
        if count < slots:
            fix = f"write slots={count}, or find out why it does not see the others (nvidia-smi)"
            text = f"{count} {what}(s), its slots are {slots}"
            found.append(Finding("devices", host, RED, text, fix))
        for busy in fact["devices"]["busy"]:
            fix = "end what uses it (nvidia-smi), or leave the host out"
            found.append(Finding("devices", host, RED, busy, fix))
    total = sum(run.slots[host] for host in facts)
    return found or [Finding("devices", ALL, OK, f"{total} x {kind}, free")]


def _clock(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    offsets = {host: fact["clock"] for host, fact in facts.items()}
    usual = sorted(offset for offset, _ in offsets.values())[(len(offsets) - 1) // 2]
    found = [
        Finding("clock", host, RED, f"{offset - usual:+.1f} s off the others", "start chrony there")
        for host, (offset, uncertain) in offsets.items()
        if abs(offset - usual) - uncertain > SKEW_SECONDS
    ]  # fmt: skip
    spread = max(abs(offset - usual) for offset, _ in offsets.values())
    return found or [Finding("clock", ALL, OK, f"within {spread:.2f} s")]


def _disk(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found, free = [], []
    for host, fact in facts.items():
        disk = fact["disk"]
        if not disk:
            return [Finding("disk", ALL, NOTE, "no --run_dir was named", "add it behind the --")]
        if disk["problem"]:
            found.append(Finding("disk", host, RED, disk["problem"]))
            continue
        if disk["free"] >= 0:
            free.append(disk["free"])
            wanted = disk["checkpoints"] * (run.checkpoint_bytes or 0)
            if disk["free"] < wanted:
                text = f"{shown_bytes(disk['free'])} free, {disk['checkpoints']} checkpoint(s) need"
                fix = "free some, choose another --run_dir, or lower --checkpoint_keep"
                found.append(Finding("disk", host, RED, f"{text} {shown_bytes(wanted)}", fix))
    size = (
        f", a checkpoint needs {shown_bytes(run.checkpoint_bytes)}" if run.checkpoint_bytes else ""
    )
    least = shown_bytes(min(free)) if free else "unknown"
    return found or [Finding("disk", ALL, OK, f"{least} free{size}")]


def _shared_memory(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found, least = [], []
    for host, fact in facts.items():
        if fact["shared_memory"] is None:
            found.append(Finding("/dev/shm", host, RED, "there is none", "mount a tmpfs there"))
            continue
        free, _ = fact["shared_memory"]
        least.append(free)
        problem = shared_memory_problem(free, run.slots[host])
        if problem:
            found.append(_split("/dev/shm", host, problem))
    return found or [Finding("/dev/shm", ALL, OK, f"{shown_bytes(min(least))} free")]


def _port(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    host, fact = next(iter(facts.items()))
    if fact["port"]:
        return [_split("port", host, fact["port"])]
    return [Finding("port", host, OK, "rank 0 can listen")]


def _locks(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found = []
    for host, fact in facts.items():
        stale, fresh = fact["locks"]
        for lock in stale:
            text = f"{lock}: left by a build that was killed, every rank would wait for it"
            found.append(Finding("build locks", host, RED, text, f"rm {lock}"))
        for lock in fresh:
            text = f"{lock}: an operator is being built now"
            found.append(Finding("build locks", host, NOTE, text, "wait, or delete it if not"))
    return _once(found) or [Finding("build locks", ALL, OK, "none")]


def _operators(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found, names = [], []
    for host, fact in facts.items():
        names = list(run.operators(fact["devices"]["kind"]))
        absent = [name for name in names if name not in fact["operators"]["built"]]
        missing = fact["operators"]["missing"]
        if absent and missing:
            text = f"{', '.join(absent)}: not built, and to build it {' and '.join(missing)} lacks"
            found.append(Finding("operators", host, RED, text, "install it"))
        elif absent:
            text = f"{', '.join(absent)}: not built, the first start takes minutes more"
            found.append(Finding("operators", host, NOTE, text, "start once on one host before"))
    said = ", ".join(names) + " built" if names else "none are needed"
    return found or [Finding("operators", ALL, OK, said)]


def _storage(facts: Mapping[str, Facts], run: Run) -> list[Finding]:
    found, rates = [], []
    for host, fact in facts.items():
        entries = fact["data"]["sources"].values()
        size, seconds = (sum(entry[key] for entry in entries) for key in ("bytes", "seconds"))
        if size < SLOW_FROM_BYTES:
            continue
        rates.append(size / max(seconds, 1e-9))
        if rates[-1] < SLOW_BYTES_PER_SECOND:
            text = f"shards are read at {shown_bytes(rates[-1])}/s"
            fix = "copy them to a local disk, or find out who else uses the storage"
            found.append(Finding("storage", host, RED, text, fix))
    least = f"{shown_bytes(min(rates))}/s at least" if rates else "too little data to tell"
    return found or [Finding("storage", ALL, OK, f"shards are read at {least}" if rates else least)]


CHECKS: tuple[Callable[[Mapping[str, Facts], Run], list[Finding]], ...] = (
    _settings, _versions, _code, _data, _devices, _clock, _disk, _shared_memory, _port, _locks,
    _operators, _storage,
)  # fmt: skip


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """Say once for all hosts what a shared file system shows on each."""
    hosts: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        hosts.setdefault((one.check, one.state, one.what, one.fix), []).append(one)
    return [
        same[0] if len(same) == 1
        else Finding(same[0].check, ", ".join(one.host for one in same), *key[1:])
        for key, same in hosts.items()
    ]  # fmt: skip


def _split(check: str, host: str, problem: str) -> Finding:
    """Return a red line from `what is wrong. What to do about it.`"""
    what, _, fix = problem.rstrip(".").partition(". ")
    return Finding(check, host, RED, what, fix[:1].lower() + fix[1:])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def table(findings: Sequence[Finding], color: bool) -> str:
    """Return the findings as lines, aligned; what is red stands out in a terminal."""
    wide = [max(len(getattr(one, name)) for one in findings) for name in ("check", "host", "state")]
    lines = []
    for one in findings:
        head = f"{one.check:<{wide[0]}}  {one.host:<{wide[1]}}  {one.state:<{wide[2]}}  "
        fix = f"  Fix: {one.fix}." if one.fix else ""
        line = f"{head}{one.what}.{fix}" if fix else f"{head}{one.what}"
        lines.append(f"\033[31m{line}\033[0m" if color and one.state == RED else line)
    return "\n".join(lines)
