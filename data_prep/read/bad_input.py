"""`Tally`, the counts of documents and bad input, and messages that name the file and line.

`work_units.read_batches` fills a `Tally`; commands sum the tallies of all tasks, print the sum and
publish it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.files.documents import InputRules, Problem
from data_prep.files.inputs import Input, stream_of
from data_prep.files.lines import count_lines
from data_prep.formats import describe_reason, format_of
from zerolm.common.errors import ConfigError

MAX_PROBLEMS = 10  # recorded per unit, which is enough to diagnose a file
SHOWN_TYPES = 6  # WARC content types listed separately
MAX_EXAMPLES = 5  # kept for each reason
MAX_COUNTED_BYTES = 1 << 30  # reread at most this much of a file to find a line number


@dataclass
class Tally:
    """Counts of the documents and bad input that one or more tasks have read, with examples."""

    num_documents: int = 0
    input_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    bad: Counter[str] = field(default_factory=Counter)  # by reason
    changed: Counter[str] = field(default_factory=Counter)  # by "from ENCODING"
    lost_bytes: int = 0
    examples: list[Problem] = field(default_factory=list)

    def add_bad(self, problems: Sequence[Problem]) -> None:
        """Count problems, and keep the first few for each reason as examples."""
        for problem in problems:
            self.bad[problem.reason] += problem.num_documents
            self.lost_bytes += problem.lost_bytes
            self._add_example(problem)

    def _add_example(self, problem: Problem) -> None:
        if sum(each.reason == problem.reason for each in self.examples) < MAX_EXAMPLES:
            self.examples.append(problem)

    def record(self) -> dict[str, Any]:
        """Return the tally as a JSON object, which `from_records` reads."""
        return {
            "documents_in": self.num_documents,
            "input_bytes": self.input_bytes,
            "skipped": dict(self.skipped),
            "bad": dict(self.bad),
            **({"changed": dict(self.changed)} if self.changed else {}),
            "lost_bytes": self.lost_bytes,
            "bad_examples": [list(each) for each in self.examples],
        }

    @classmethod
    def from_records(cls, records: Sequence[dict[str, Any]]) -> "Tally":
        """Return the sum of several records, with the first examples for each reason."""
        total = cls()
        for record in records:
            total.num_documents += record["documents_in"]
            total.input_bytes += record["input_bytes"]
            total.skipped.update(record["skipped"])
            total.bad.update(record["bad"])
            total.changed.update(record.get("changed", {}))
            total.lost_bytes += record["lost_bytes"]
            for example in record["bad_examples"]:
                total._add_example(Problem(*example))
        return total


def describe_problems(
    inputs: Sequence[Input], problems: Sequence[Problem], rules: InputRules
) -> list[str]:
    """Return a message for each problem: `file:line: problem`.

    Line numbers are counted only here, by rereading the file up to that line. Beyond the first GiB
    of a file, the message contains the byte offset instead.
    """
    places: dict[Problem, str] = {}
    for name in {problem.name for problem in problems}:
        countable: list[Problem] = []
        for problem in sorted((p for p in problems if p.name == name), key=lambda p: p.start):
            shown = format_of(inputs[problem.input]).places
            if problem.is_row:
                places[problem] = problem.place
            elif problem.reason == "unreadable" or shown == "file":
                places[problem] = name
            else:
                places[problem] = problem.place
                if shown == "line" and problem.start < MAX_COUNTED_BYTES:
                    countable.append(problem)
        if countable and Path(name).is_file():
            stream = stream_of(inputs[countable[0].input], 0, rules)
            numbers = count_lines(stream, [problem.start for problem in countable])
            for problem, number in zip(countable, numbers, strict=True):
                places[problem] = f"{name}:{number}"
    return [f"{places[problem]}: {problem.detail}" for problem in problems]


def check_bad_fraction(inputs: Sequence[Input], tally: Tally, rules: InputRules) -> None:
    """Raise an error if bad input makes up too large a fraction of the corpus."""
    num_bad = sum(tally.bad.values())
    num_all = tally.num_documents + num_bad
    total_bytes = sum(each.size_bytes or 0 for each in inputs)
    problems = []
    if num_bad > rules.max_bad_fraction * num_all:
        problems.append(f"{num_bad:,} of {num_all:,} documents were bad")
    if tally.lost_bytes > rules.max_bad_fraction * total_bytes:
        problems.append(f"{tally.lost_bytes:,} of {total_bytes:,} bytes could not be read")
    if problems:
        shown = describe_problems(inputs, tally.examples[:MAX_PROBLEMS], rules)
        raise ConfigError(
            [
                f"--input: {' and '.join(problems)}, more than --max_bad_fraction "
                f"{rules.max_bad_fraction}. Correct the input, or raise the limit. Examples:",
                *shown,
            ]
        )


def bad_input_record(inputs: Sequence[Input], tally: Tally, rules: InputRules) -> dict[str, Any]:
    """Return the value of a manifest's key `bad_input`: counts by reason, and examples with
    positions.
    """
    return {
        "on_bad_input": rules.on_bad_input,
        "bad_documents": dict(sorted(tally.bad.items())),
        **({"changed_documents": dict(sorted(tally.changed.items()))} if tally.changed else {}),
        "lost_bytes": tally.lost_bytes,
        "examples": describe_problems(inputs, tally.examples, rules),
    }


def describe_skipped(skipped: Mapping[str, int]) -> dict[str, int]:
    """Return counts by description; keys `REASON.TYPE` are merged, and their types listed."""
    counts: Counter[str] = Counter()
    types: dict[str, Counter[str]] = {}
    for key, count in skipped.items():
        reason, _, kind = key.partition(".")
        counts[reason] += count
        types.setdefault(reason, Counter())[kind] += count
    described = {}
    for reason, count in sorted(counts.items()):
        shown = [f"{n:,} {kind}" for kind, n in types[reason].most_common(SHOWN_TYPES) if kind]
        shown += ["..."] if len(types[reason]) > SHOWN_TYPES else []
        what = describe_reason(reason)
        described[f"{what} ({', '.join(shown)})" if shown else what] = count
    return described


def describe_changes(changed: Mapping[str, int]) -> list[str]:
    """Return how many documents were decoded from each encoding other than UTF-8."""
    return [f"decoded {name}: {count:,}" for name, count in sorted(changed.items())]


def summary_lines(inputs: Sequence[Input], tally: Tally, rules: InputRules) -> list[str]:
    """Return the lines that a command prints about skipped documents and bad input."""
    lines = [
        f"skipped: {count:,} {what}" for what, count in describe_skipped(tally.skipped).items()
    ]
    lines += [f"documents {line}" for line in describe_changes(tally.changed)]
    for reason, count in sorted(tally.bad.items()):
        examples = [each for each in tally.examples if each.reason == reason]
        lines.append(f"bad input: {count:,} in {describe_reason(reason)}; for example")
        lines += [f"    {line}" for line in describe_problems(inputs, examples[:1], rules)]
    if tally.lost_bytes:
        lines.append(f"bad input: {tally.lost_bytes:,} bytes of files could not be read")
    return lines
