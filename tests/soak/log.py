"""The log of the campaign, one line per chunk, and the table of it."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Chunk = dict[str, Any]
MAX_DIFFERENCES = 20
QUIET_KINDS = ("tracker", "report", "full disk")  # the run goes on, so there is no recovery


def read(path: Path) -> list[Chunk]:
    """Return the chunks of a log, none if there is none; a line that is cut off is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append(path: Path, chunk: Chunk) -> None:
    """Append a chunk, after removing a line that an interrupted campaign has cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    if not text.endswith("\n") and text:
        path.write_text(text[: text.rfind("\n") + 1])
    with open(path, "a") as file:
        file.write(json.dumps(chunk) + "\n")


def num_kills(chunks: Iterable[Chunk]) -> int:
    return sum(len(chunk["kills"]) for chunk in chunks)


def next_number(chunks: Iterable[Chunk], running: Iterable[int] = ()) -> int:
    """Return the smallest number of a chunk that is neither in the log nor running."""
    taken = {chunk["chunk"] for chunk in chunks} | set(running)
    return next(number for number in range(len(taken) + 1) if number not in taken)


def is_equal(chunk: Chunk) -> bool:
    """Return whether a chunk has neither differences nor other problems."""
    return not chunk["differences"] and not chunk["problems"]


# ---- The table


def table(chunks: Sequence[Chunk], command: str) -> str:
    """Render the log as Markdown."""
    kills = [(chunk, kill) for chunk in chunks for kill in chunk["kills"]]
    exact = [chunk for chunk in chunks if not chunk["differences"]]
    training = sum(chunk["training_seconds"] for chunk in chunks)
    lines = [
        "# Kills: the same run, bit for bit", "",
        "```bash", command, "```", "",
        f"{len(kills)} kills in {len(chunks)} runs, {dates(chunks)}. One kill every "
        f"{training / max(1, len(kills)):.0f} s of training. {len(exact)} of {len(chunks)} runs "
        "are equal to the run without faults in every metric row, every tensor and number of the "
        "last checkpoint, and every sequence of every step.", "",
        *_counts("Kind", [(kill["kind"], chunk) for chunk, kill in kills]),
        *_counts("Configuration", [(chunk["configuration"], chunk) for chunk, _ in kills]),
        "## Recovery", "",
        "Seconds from a kill to the end of the next training step, and its parts.", "",
        "| part | number | median | 95% |", "|---|---|---|---|",
        *(_seconds_row(part, values) for part, values in _parts(kills).items()),
        *(_seconds_row(part, values) for part, values in _recoveries(chunks).items()), "",
        *_problems(chunks), *_notes(chunks),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def dates(chunks: Sequence[Chunk]) -> str:
    days = sorted({chunk["date"][:10] for chunk in chunks})
    machines = sorted({chunk["machine"] for chunk in chunks})
    commits = list(dict.fromkeys((chunk["commit"] or "?")[:8] for chunk in chunks))
    first_to_last = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "no day yet"
    return f"{first_to_last}, on {'; '.join(machines)}, at {', '.join(commits)}"


def _counts(name: str, pairs: Sequence[tuple[str, Chunk]]) -> list[str]:
    lines = [f"| {name.lower()} | kills | in runs that are equal |", "|---|---|---|"]
    for value in sorted({value for value, _ in pairs}):
        chunks = [chunk for each, chunk in pairs if each == value]
        equal = sum(not chunk["differences"] for chunk in chunks)
        lines.append(f"| {value} | {len(chunks)} | {equal} |")
    return [*lines, ""]


def _parts(kills: Sequence[tuple[Chunk, dict[str, Any]]]) -> dict[str, list[float]]:
    """Return {part: seconds of each recovery}, the total first."""
    found: dict[str, list[float]] = {"kill to next step": [], "kill to its report": []}
    for _, kill in kills:
        if kill["recovered_seconds"] is not None:
            found["kill to next step"].append(kill["recovered_seconds"])
        if kill["reported_seconds"] is not None and kill["kind"] not in QUIET_KINDS:
            found["kill to its report"].append(kill["reported_seconds"])
        for part, seconds in (kill["parts"] or {}).items():
            found.setdefault(f"start: {part}", []).append(seconds)
    return found


def _recoveries(chunks: Sequence[Chunk]) -> dict[str, list[float]]:
    """Return {part: seconds} of the recoveries that the runs have logged, the total first."""
    found: dict[str, list[float]] = {"failure to next new step": []}
    for recovery in (each for chunk in chunks for each in chunk.get("recoveries", ())):
        found["failure to next new step"].append(recovery["seconds"])
        for part, seconds in recovery["parts"].items():
            found.setdefault(f"of that: {part}", []).append(seconds)
    return found


def _seconds_row(part: str, values: Sequence[float]) -> str:
    if not values:
        return f"| {part} | 0 | | |"
    high = sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
    return f"| {part} | {len(values)} | {statistics.median(values):.1f} | {high:.1f} |"


def _problems(chunks: Sequence[Chunk]) -> list[str]:
    lines = [
        f"- run {chunk['chunk']} ({chunk['configuration']}): {line}"
        for chunk in chunks
        for line in [*chunk["differences"][:3], *chunk["problems"]]
    ]
    return ["## Differences and problems", "", *(lines or ["None."]), ""]


def _notes(chunks: Sequence[Chunk]) -> list[str]:
    """Return what was added to the log by hand."""
    notes = [f"- chunk {chunk['chunk']}: {chunk['note']}" for chunk in chunks if "note" in chunk]
    return ["## Notes", "", *notes] if notes else []
