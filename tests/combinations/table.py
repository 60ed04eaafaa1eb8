"""The table of the campaign's log."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tests.combinations.draws import FACTORS, coverage

Entry = dict[str, Any]


def newest(entries: Iterable[Entry]) -> list[Entry]:
    """Return the last entry of each draw."""
    return list({entry["number"]: entry for entry in entries}.values())


def shown(entry: Entry) -> str:
    """Return a line about a draw for the console."""
    values = " ".join(
        value if value not in ("on", "off") else name
        for name, value in entry["draw"].items()
        if value != "off"
    )
    result = f"refused: {entry['refused']}" if "refused" in entry else "equal"
    result = "not compiled" if "not_compiled" in entry else result
    figures = [f"{name} {entry[key]:.0e}" for name, key in DIFFERENCES.items() if key in entry]
    lines = [f"\n    {line}" for line in entry["problems"]]
    return (
        f"draw {entry['number']}, {entry['seconds']:.0f} s, {values}: "
        f"{'DIFFERENT' if lines else result} {' '.join(figures)}" + "".join(lines)
    )


DIFFERENCES = {
    "other topology, loss": "moved_loss",
    "other topology, weights": "moved_weights",
    "plain PyTorch, loss": "plain_loss",
}


def summary(entries: Sequence[Entry]) -> str:
    trained, failed = _trained(entries), sum("not_compiled" in entry for entry in entries)
    refused = sum("refused" in entry for entry in entries)
    found, wanted = coverage(entry["draw"] for entry in trained)
    different = [entry["number"] for entry in entries if entry["problems"]]
    return (
        f"{len(entries)} draws: {len(trained)} trained, {refused} refused by the run and by "
        f"--check alike, {failed} not compiled by torch (its C++ for bf16 on a CPU); {found} of "
        f"{wanted} pairs of values ({found / wanted:.1%}); with differences: {different or 'none'}"
    )


def rendered(entries: Sequence[Entry]) -> str:
    """Render the log as Markdown."""
    trained = _trained(entries)
    commits = list(dict.fromkeys((entry["commit"] or "?")[:8] for entry in entries))
    machines = sorted({entry["machine"] for entry in entries})
    days = sorted({entry["date"][:10] for entry in entries})
    lines = [
        "# Combinations: settings that meet, and the same curve", "",
        "```bash", "python -m tests.combinations --log combinations.jsonl --draws 200", "```", "",
        f"{summary(entries)}.", "",
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, on {'; '.join(machines)}, at "
        f"{', '.join(commits)}. Killed and resumed on the same topology, every metric, tensor, "
        "number and sequence of a draw is equal in every bit.", "",
        "| compared with | precision | draws | median | largest |", "|---|---|---|---|---|",
        *(row for name, key in DIFFERENCES.items() for row in _differences(name, key, trained)),
        "", "| factor | draws that were trained, by value |", "|---|---|",
    ]  # fmt: skip
    for name in FACTORS:
        counts = Counter(entry["draw"][name] for entry in trained)
        lines.append(f"| {name} | {', '.join(f'{v} {n}' for v, n in counts.most_common())} |")
    reasons = Counter(line for entry in entries for line in entry.get("refused", ()))
    lines += ["", "## Refused", "", "| draws | reason |", "|---|---|"]
    lines += [f"| {number} | {line} |" for line, number in reasons.most_common()]
    lines += ["", "## Differences", ""]
    found = [f"- draw {each['number']}: {line}" for each in entries for line in each["problems"]]
    return "\n".join([*lines, *(found or ["None."])]) + "\n"


def _trained(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if not {"refused", "not_compiled"} & entry.keys()]


def _differences(name: str, key: str, entries: Sequence[Entry]) -> list[str]:
    rows = []
    for precision in FACTORS["precision"]:
        values = sorted(
            entry[key] for entry in entries
            if key in entry and entry["draw"]["precision"] == precision
        )  # fmt: skip
        if values:
            middle = values[len(values) // 2]
            rows.append(
                f"| {name} | {precision} | {len(values)} | {middle:.1e} | {values[-1]:.1e} |"
            )
    return rows
