"""Counts for a stage's tasks: documents and bytes read and written, drops by reason, and examples.

Each task's record contains its counts; `stage.json` and the report contain the totals.
"""

from collections.abc import Iterable, Mapping
from typing import Any

MAX_EXAMPLES = 3  # examples per reason, in each record and in stage.json
SHOWN_CHARACTERS = 200
SUMMED = ("documents_in", "documents_out", "text_bytes_in", "text_bytes_out")
SUMMED_BY_KEY = ("dropped", "dropped_bytes", "changed", "lengths_in", "lengths_out")

Json = dict[str, Any]


class Counts:
    """Counts of the documents that a task reads, writes, changes and drops."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(SUMMED, 0)
        self.by_key: dict[str, dict[str, int]] = {name: {} for name in SUMMED_BY_KEY}
        self.examples: dict[str, list[Json]] = {}

    def add_input(self, text_bytes: int) -> None:
        """Count a document that was read; `text_bytes` is the size of its text in UTF-8."""
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
        """Count a document that was dropped, and keep the first few for each reason as examples.

        Args:
            text: the document's text, or the part that caused the drop.
        """
        self._add("dropped", reason)
        self._add("dropped_bytes", reason, text_bytes)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append({"id": document_id, "text": text[:SHOWN_CHARACTERS]})

    def add_changed(self, name: str) -> None:
        """Count a kept document whose text the named filter changed."""
        self._add("changed", name)

    def record(self) -> Json:
        """Return the counts as they are stored in a task's record."""
        return {**self.sums, **self.by_key, "examples": self.examples}

    def _add(self, name: str, key: str, number: int = 1) -> None:
        self.by_key[name][key] = self.by_key[name].get(key, 0) + number


def _length_bin(text_bytes: int) -> str:
    """Return a length's histogram bin: the largest power of two that does not exceed the length."""
    return str(1 << (text_bytes.bit_length() - 1) if text_bytes else 0)


def merge_counts(records: Iterable[Mapping[str, Any]]) -> Json:
    """Return the sum of the tasks' counts, with the first examples for each reason."""
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
        for reason, examples in record.get("examples", {}).items():
            shown = merged["examples"].setdefault(reason, [])
            shown += examples[: MAX_EXAMPLES - len(shown)]
    for name in ("dropped", "dropped_bytes", "changed", "examples"):
        merged[name] = dict(sorted(merged[name].items()))
    for name in ("lengths_in", "lengths_out"):
        merged[name] = dict(sorted(merged[name].items(), key=lambda item: int(item[0])))
    return merged
