"""What was read and what was bad: counted over tasks, shown with file and line.

`units.read_batches` fills a `Tally`; commands add those of all tasks up, and show and publish them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.documents import HARMLESS, REASONS, InputRules, Problem
from data_prep.readers import Input
from data_prep.streams import Stream, count_lines
from zerolm.errors import ConfigError

MAX_PROBLEMS = 10  # shown of a unit: enough to see what is wrong with a file
MAX_EXAMPLES = 5  # kept of each reason
COUNTED_BYTES = 1 << 30  # read again at most to name the number of a line rather than its byte


@dataclass
class Tally:
    """What was read by a task, or by several: counts, and examples of what was bad."""

    num_documents: int = 0
    input_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # harmless; see documents.HARMLESS
    bad: Counter[str] = field(default_factory=Counter)  # see documents.REASONS
    lost_bytes: int = 0
    examples: list[Problem] = field(default_factory=list)

    def add_bad(self, problems: Sequence[Problem]) -> None:
        """Count problems, and keep the first of each reason."""
        for problem in problems:
            self.bad[problem.reason] += problem.num_documents
            self.lost_bytes += problem.lost_bytes
            if sum(each.reason == problem.reason for each in self.examples) < MAX_EXAMPLES:
                self.examples.append(problem)

    def record(self) -> dict[str, Any]:
        """Return it for a JSON file; `from_record` reads it."""
        return {
            "documents_in": self.num_documents,
            "input_bytes": self.input_bytes,
            "skipped": dict(self.skipped),
            "bad": dict(self.bad),
            "lost_bytes": self.lost_bytes,
            "bad_examples": [list(each) for each in self.examples],
        }

    @classmethod
    def from_records(cls, records: Sequence[dict[str, Any]]) -> "Tally":
        """Return the sum of records, in their order."""
        total = cls()
        for record in records:
            total.num_documents += record["documents_in"]
            total.input_bytes += record["input_bytes"]
            total.skipped.update(record["skipped"])
            total.bad.update(record["bad"])
            total.lost_bytes += record["lost_bytes"]
            for each in record["bad_examples"]:
                problem = Problem(*each)
                if sum(one.reason == problem.reason for one in total.examples) < MAX_EXAMPLES:
                    total.examples.append(problem)
        return total


def describe(inputs: Sequence[Input], problems: Sequence[Problem], rules: InputRules) -> list[str]:
    """Return each problem with its place: `file:line: what is wrong`.

    Lines are counted only here, by reading the file up to there once more, and only where that is
    at most a GiB: further in, the byte is named.
    """
    places: dict[Problem, str] = {}
    for name in {each.name for each in problems}:
        own = sorted((each for each in problems if each.name == name), key=lambda p: p.start)
        for each in own:
            places[each] = f"{name} (byte {each.start:,})"
            if each.is_row:
                places[each] = f"{name}:{each.start + 1}"
            elif each.reason in ("unreadable",):
                places[each] = name
        own = [each for each in own if not each.is_row and each.start < COUNTED_BYTES]
        own = [each for each in own if each.reason != "unreadable"]
        if own and Path(name).is_file():
            stream = Stream(name, inputs[own[0].input].suffix, 0, rules.max_expansion)
            numbers = count_lines(stream, [each.start for each in own])
            places.update((each, f"{name}:{line}") for each, line in zip(own, numbers, strict=True))
    return [f"{places[each]}: {each.detail}" for each in problems]


def check_bad_fraction(inputs: Sequence[Input], tally: Tally, rules: InputRules) -> None:
    """Refuse a corpus of which too much was bad.

    Raises:
        ConfigError: more than `max_bad_fraction` of the documents, or of the bytes.
    """
    num_bad = sum(tally.bad.values())
    num_all = tally.num_documents + num_bad
    total_bytes = sum(each.size_bytes or 0 for each in inputs)
    problems = []
    if num_bad > rules.max_bad_fraction * num_all:
        problems.append(f"{num_bad:,} of {num_all:,} documents were bad")
    if tally.lost_bytes > rules.max_bad_fraction * total_bytes:
        problems.append(f"{tally.lost_bytes:,} of {total_bytes:,} bytes could not be read")
    if problems:
        shown = describe(inputs, tally.examples[:MAX_PROBLEMS], rules)
        raise ConfigError(
            [
                f"--input: {' and '.join(problems)}, more than --max_bad_fraction "
                f"{rules.max_bad_fraction}. Correct the input, or raise the limit. Examples:",
                *shown,
            ]
        )


def bad_input_record(inputs: Sequence[Input], tally: Tally, rules: InputRules) -> dict[str, Any]:
    """Return what a manifest says of bad input: counts by reason, examples with their places."""
    return {
        "on_bad_input": rules.on_bad_input,
        "bad_documents": dict(sorted(tally.bad.items())),
        "lost_bytes": tally.lost_bytes,
        "examples": describe(inputs, tally.examples, rules),
    }


def summary_lines(inputs: Sequence[Input], tally: Tally, rules: InputRules) -> list[str]:
    """Return what a command prints of what it left out."""
    lines = [
        f"skipped: {count:,} {HARMLESS.get(reason, reason)}"
        for reason, count in sorted(tally.skipped.items())
    ]
    for reason, count in sorted(tally.bad.items()):
        own = [each for each in tally.examples if each.reason == reason]
        lines.append(f"bad input: {count:,} in {REASONS[reason]}; for example")
        lines += [f"    {line}" for line in describe(inputs, own[:1], rules)]
    if tally.lost_bytes:
        lines.append(f"bad input: {tally.lost_bytes:,} bytes of files could not be read")
    return lines
