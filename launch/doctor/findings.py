"""The rows of the doctor's table and their formatting."""

from collections.abc import Sequence
from dataclasses import dataclass

from zerolm.common.values import printable

OK, NOTE, RED = "ok", "note", "RED"
ALL = "all"
MAX_WIDTH = 24  # of a column; a longer cell, such as a list of 64 hosts, is not padded


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        host: the name of the affected host, or `all`.
        state: OK, NOTE or RED.
        measured: bytes per second that a device sends to another host, if the row is about that.
    """

    check: str
    host: str
    state: str
    fact: str
    fix: str = ""
    measured: float | None = None


def from_problem(check: str, host: str, problem: str) -> Finding:
    """Convert a problem of the form `Fact. How to fix it.` to a red finding."""
    fact, _, fix = problem.rstrip(".").partition(". ")
    return Finding(check, host, RED, fact, fix[:1].lower() + fix[1:])


def merge_hosts(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings that differ only in the host, such as problems with a shared file system."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.check, finding.state, finding.fact, finding.fix)
        groups.setdefault(key, []).append(finding)
    return [
        Finding(check, ", ".join(finding.host for finding in group), state, fact, fix)
        for (check, state, fact, fix), group in groups.items()
    ]


def table(findings: Sequence[Finding], color: bool) -> str:
    """Return the findings as aligned lines; `color` prints RED findings in red."""
    columns = ("check", "host", "state")
    cells_of = [[getattr(finding, name) for finding in findings] for name in columns]
    widths = [min(MAX_WIDTH, max(map(len, cells))) for cells in cells_of]
    lines = []
    for finding in findings:
        cells = (finding.check, finding.host, finding.state)
        head = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        line = f"{head}{finding.fact}" + (f".  Fix: {finding.fix}." if finding.fix else "")
        line = printable(line)  # a host's facts may contain text from its files
        lines.append(f"\033[31m{line}\033[0m" if color and finding.state == RED else line)
    return "\n".join(lines)
