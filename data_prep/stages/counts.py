"""Counts of a stage's tasks: documents and bytes in and out, drops by reason, scores, and examples.

They are part of each task's record, and their sum is part of `stage.json` and the report.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_EXAMPLES = 3  # of each reason, in a record and in stage.json
SHOWN_CHARACTERS = 200
SUMMED = ("documents_in", "documents_out", "text_bytes_in", "text_bytes_out")
SUMMED_BY_KEY = ("dropped", "dropped_bytes", "changed", "tags", "lengths_in", "lengths_out")
HISTOGRAMS = ("scores_in", "scores_out")  # of scores: {name: {bin: [documents, bytes]}}
SHOWN_SHARES = (0.9, 0.75, 0.5, 0.25, 0.1)  # of the documents, for which thresholds are shown

Json = dict[str, Any]


class Counts:
    """Counts of the documents that one task reads, writes, changes and drops."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(SUMMED, 0)
        self.by_key: dict[str, dict[str, int]] = {name: {} for name in SUMMED_BY_KEY}
        self.histograms: dict[str, dict[str, dict[str, list[int]]]] = {}
        self.examples: dict[str, list[Json]] = {}

    def add_input(self, text_bytes: int) -> None:
        """Count a document that was read; `text_bytes` in UTF-8."""
        self.sums["documents_in"] += 1
        self.sums["text_bytes_in"] += text_bytes
        self._add("lengths_in", _length_bin(text_bytes))

    def add_output(self, text_bytes: int) -> None:
        """Count a document that was written."""
        self.sums["documents_out"] += 1
        self.sums["text_bytes_out"] += text_bytes
        self._add("lengths_out", _length_bin(text_bytes))

    def add_dropped(
        self, reason: str, text_bytes: int, document_id: Any = None, text: str = ""
    ) -> None:
        """Count a document that was dropped, and keep the first ones of each reason as examples.

        Args:
            text: its text, or the part that decided.
        """
        self._add("dropped", reason)
        self._add("dropped_bytes", reason, text_bytes)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append({"id": document_id, "text": text[:SHOWN_CHARACTERS]})

    def add_changed(self, name: str) -> None:
        """Count a kept document whose text the named filter changed."""
        self._add("changed", name)

    def add_tags(self, tags: Iterable[str]) -> None:
        """Count the tags of a kept document."""
        for tag in tags:
            self._add("tags", tag)

    def add_scores(self, end: str, scores: Mapping[str, Any], text_bytes: int) -> None:
        """Add the scores of a document to the histograms; `end` is one of HISTOGRAMS."""
        for name, value in scores.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                bins = self.histograms.setdefault(end, {}).setdefault(name, {})
                totals = bins.setdefault(score_bin(value), [0, 0])
                totals[0] += 1
                totals[1] += text_bytes

    def record(self) -> Json:
        """Return the counts as a part of a task's record."""
        return {**self.sums, **self.by_key, **self.histograms, "examples": self.examples}

    def _add(self, name: str, key: str, number: int = 1) -> None:
        self.by_key[name][key] = self.by_key[name].get(key, 0) + number


def _length_bin(text_bytes: int) -> str:
    """Return the histogram bin of a length: the largest power of two that is not above it."""
    return str(1 << (text_bytes.bit_length() - 1) if text_bytes else 0)


def score_bin(value: float) -> str:
    """Return the lower end of the histogram bin of a score.

    Bins are 0.01 wide from -1 to 1.01, and have two significant digits beyond.
    """
    if not math.isfinite(value):
        return str(value)
    digits = 2 if abs(value) < 1.01 else 1 - math.floor(math.log10(abs(value)))
    low = math.floor(round(value * 10.0**digits, 9)) / 10.0**digits
    return f"{low + 0:.{max(digits, 0)}f}"


def merge_counts(records: Iterable[Mapping[str, Any]]) -> Json:
    """Return the sum of the counts of tasks, with the first examples of each reason."""
    merged: Json = {
        **dict.fromkeys(SUMMED, 0),
        **{name: {} for name in SUMMED_BY_KEY},
        "examples": {},
    }
    for record in records:
        for name in SUMMED:
            merged[name] += record.get(name, 0)
        for name in SUMMED_BY_KEY:
            for key, number in record.get(name, {}).items():
                merged[name][key] = merged[name].get(key, 0) + number
        for end in HISTOGRAMS:
            for name, bins in record.get(end, {}).items():
                totals = merged.setdefault(end, {}).setdefault(name, {})
                for low, numbers in bins.items():
                    before = totals.get(low, (0, 0))
                    totals[low] = [a + b for a, b in zip(before, numbers, strict=True)]
        for reason, examples in record.get("examples", {}).items():
            shown = merged["examples"].setdefault(reason, [])
            shown += examples[: MAX_EXAMPLES - len(shown)]
    for end in HISTOGRAMS:
        if end in merged:
            merged[end] = {
                name: dict(sorted(bins.items(), key=lambda item: float(item[0])))
                for name, bins in sorted(merged[end].items())
            }
    for name in ("dropped", "dropped_bytes", "changed", "tags", "examples"):
        merged[name] = dict(sorted(merged[name].items()))
    for name in ("lengths_in", "lengths_out"):
        merged[name] = dict(sorted(merged[name].items(), key=lambda item: int(item[0])))
    return merged


def thresholds(bins: Mapping[str, Sequence[int]]) -> list[tuple[str, int, int, int, int]]:
    """Return thresholds that keep about 90, 75, 50, 25 and 10 % of the documents with a score.

    Returns:
        The threshold, the documents and bytes at or above it, and all documents and bytes.
    """
    total = sum(each[0] for each in bins.values())
    all_bytes = sum(each[1] for each in bins.values())
    above, documents, size = [], 0, 0
    for low, (count, text_bytes) in reversed(list(bins.items())):
        documents, size = documents + count, size + text_bytes
        above.append((low, documents, size, total, all_bytes))
    chosen = [min(above, key=lambda row: abs(row[1] - share * total)) for share in SHOWN_SHARES]
    return list(dict.fromkeys(chosen))
