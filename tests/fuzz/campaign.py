"""A turn of the fuzzer: draws inputs of some targets for a while, and counts what became of them.

hypothesis draws the inputs and makes those with a finding smaller. A finding is known by its error
and the line that raises it; one that was found before is counted and not made smaller again.
"""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.fuzz.targets import Bench, Input, Target

BATCH = 100  # inputs of one target, after which the next target comes
SHRINK_SECONDS = 30.0
OPTIONS: dict[str, Any] = {
    "deadline": None, "database": None, "print_blob": False,
    "suppress_health_check": list(HealthCheck), "phases": [Phase.generate, Phase.shrink],
    "report_multiple_bugs": False,
}  # fmt: skip


class _Enough(KeyboardInterrupt):
    """Ends a batch; hypothesis passes it on."""


@dataclass
class Finding:
    """An input that was answered in another way than it must be."""

    error: str
    given: Input
    trace: str
    times: int = 1


@dataclass
class Tally:
    """What became of the inputs of one target."""

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(each.times for each in self.findings.values())

    @property
    def refused(self) -> int:
        return self.inputs - self.accepted - self.failed


def run(
    bench: Bench,
    targets: Sequence[Target],
    first_seed: int,
    *,
    seconds: float = float("inf"),
    inputs: int | None = None,
) -> dict[str, Tally]:
    """Draw inputs of the targets in turns, until the time is over or each had so many."""
    until = time.monotonic() + seconds
    tallies = {target.name: Tally() for target in targets}
    number = first_seed
    while time.monotonic() < until:
        for target in targets:
            tally = tallies[target.name]
            wanted = BATCH if inputs is None else min(BATCH, inputs - tally.inputs)
            if wanted > 0 and time.monotonic() < until:
                _batch(bench, target, number, wanted, until, tally)
        number += 1
        if inputs is not None and all(tally.inputs >= inputs for tally in tallies.values()):
            break
    return tallies


def _batch(
    bench: Bench, target: Target, number: int, inputs: int, until: float, tally: Tally
) -> None:
    ends = until
    found: Finding | None = None
    signature = ""
    start = tally.inputs

    @seed(number)
    @settings(max_examples=inputs, **OPTIONS)
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        nonlocal found, signature, ends
        if time.monotonic() > ends or (found is None and tally.inputs - start >= inputs):
            raise _Enough
        drawn = bench.draw(target, data)
        began = time.monotonic()
        try:
            accepted = bench.read(target, drawn)
        except Exception as error:
            mark = where(error)
            if found is None:
                tally.inputs += 1
                if mark in tally.findings:
                    tally.findings[mark].times += 1
                    return
                ends = time.monotonic() + SHRINK_SECONDS
                signature = mark
            if mark != signature:
                return
            trace = "".join(traceback.format_exception(error)[-6:])
            found = Finding(f"{type(error).__name__}: {error}"[:500], drawn, trace)
            raise
        if found is None:
            tally.inputs += 1
            tally.accepted += accepted
            tally.slowest = max(tally.slowest, time.monotonic() - began)

    began = time.monotonic()
    try:
        examples()
    except (_Enough, Exception):
        if found is None and not time.monotonic() > until and tally.inputs - start < inputs:
            raise  # of the fuzzer itself
    tally.seconds += time.monotonic() - began
    if found is not None:
        tally.findings[signature] = found


def where(error: BaseException) -> str:
    """Return what tells a finding from others: the error, and the last line of the project."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if Path(each.filename).is_relative_to(ROOT)]
    ours = [each for each in ours if ".venv" not in each.filename] or frames
    of_product = [each for each in ours if "/tests/" not in each.filename]
    last = (of_product or ours)[-1]
    text = "" if of_product else str(error)[:60]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno} {text}"


# ---- Tables


def table(tallies: dict[str, Tally]) -> str:
    rows = [
        "| target | inputs | refused | accepted | findings | inputs with one | per second |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in tallies.items():
        pace = each.inputs / each.seconds if each.seconds else 0
        rows.append(
            f"| {name} | {each.inputs:,} | {each.refused:,} | {each.accepted:,} | "
            f"{len(each.findings)} | {each.failed:,} | {pace:.0f} |"
        )
    return "\n".join(rows) + "\n"


def findings_of(tallies: dict[str, Tally]) -> str:
    """Return the findings as text: the smallest input that has each, and its traceback."""
    parts = []
    for name, tally in tallies.items():
        for mark, each in tally.findings.items():
            parts.append(
                f"{name}: {mark} ({each.times} times)\n{each.given!r}\n{each.error}\n{each.trace}"
            )
    return "\n".join(parts)
