"""Cuts the power of a recorded writer after each of its operations, in many ways."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import xxhash

from tests.power_loss.disk import Disk, Tree
from tests.power_loss.scenarios import Scenario

PATTERNS = 4  # random ones of each kind, at each point


@dataclass
class Result:
    """What became of the disks that a power loss may leave.

    Attributes:
        states: number of different disks that were tried.
        seen: number of all that were made, with repeated ones.
        outcomes: {what became of a disk: how often}.
    """

    points: int = 0
    states: int = 0
    seen: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)


def cut(
    scenario: Scenario,
    seed: int,
    *,
    first: int = 0,
    share: float = 1.0,
    seconds: float = float("inf"),
) -> Result:
    """Try what a power loss may leave after each operation.

    Args:
        first: number of operations after which the power is cut for the first time.
        share: of the random patterns, what is tried.
        seconds: no further disk is tried after that.
    """
    rng, result, disk = random.Random(seed), Result(), scenario.disk()
    tried: set[str] = set()
    until = time.monotonic() + seconds
    while disk.at < first:
        disk.advance()
    while time.monotonic() < until:
        result.points += 1
        for kind, tree in _losses(disk, rng, share):
            result.seen += 1
            digest = _digest(tree)
            # At the end of the writer nothing may be lost, so the same disk is tried again.
            key = f"{digest} {disk.at == len(disk.operations)}"
            if key in tried:
                continue
            tried.add(key)
            result.states += 1
            try:
                result.outcomes[scenario.recovers(tree, disk.at)] += 1
            except Exception as error:
                result.outcomes["FINDING"] += 1
                text = f"{type(error).__name__}: {error}"[:600]
                last = disk.operations[disk.at - 1] if disk.at else None
                after = f"{last.kind} {last.path} {last.other}" if last else "nothing"
                result.findings.setdefault(text[:120], f"after {disk.at}, {after}; {kind}: {text}")
        if disk.at == len(disk.operations):
            break
        disk.advance()
    return result


def _losses(disk: Disk, rng: random.Random, share: float) -> Iterator[tuple[str, Tree]]:
    """Yield what a power loss may leave now, with a name of the pattern."""
    pending = disk.pending()
    yield "nothing unsynced is kept", disk.after_loss(lambda number: False)
    if not pending:
        return
    yield "everything is kept", disk.after_loss(lambda number: True)
    for _ in range(PATTERNS):
        if rng.random() >= share:
            continue
        one = rng.choice(pending)
        others = {*pending} - {one}
        yield f"only operation {one} is kept", disk.after_loss({one}.__contains__)
        yield f"only operation {one} is lost", disk.after_loss(others.__contains__)
        likely = rng.choice([0.2, 0.5, 0.8])
        kept = {number for number in pending if rng.random() < likely}
        yield f"operations {sorted(kept)} are kept", disk.after_loss(kept.__contains__)
        yield f"operations {sorted(kept)} are kept in part", disk.after_loss(kept.__contains__, rng)


def _digest(tree: Tree) -> str:
    hasher = xxhash.xxh3_128()
    for path, content in sorted(tree.items()):
        data = content.encode() if isinstance(content, str) else content or b""
        hasher.update(f"{path}\0{type(content).__name__}{len(data)}\0".encode())
        hasher.update(data)
    return hasher.hexdigest()
