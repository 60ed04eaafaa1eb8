"""Samples documents by a hash of their text, independent of their order and of the files.

The sample consists of the documents with the smallest hashes, up to a size in bytes, so each
source is represented in proportion to its text. The sample size bounds memory, copies of a
document are sampled together, and a larger sample contains every smaller one.
"""

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from data_prep.files.documents import InputRules
from data_prep.read.bad_input import Tally, check_bad_fraction
from data_prep.read.readers import require_unchanged
from data_prep.read.work_units import plan_units, read_batches


class Sample:
    """A sample of at most `limit_bytes` of UTF-8: the documents, from all sources, with the
    smallest hashes.

    It contains either all copies of a document or none, and at least one document with its copies.
    """

    def __init__(self, limit_bytes: int, sources: Sequence[str]):
        self.limit_bytes, self.sources = limit_bytes, list(sources)
        self.num_documents = self.num_bytes = 0  # of all documents added
        self.kept_bytes = 0
        self._limit_hash: float = math.inf  # the smallest hash among the dropped documents
        self._largest_first: list[int] = []  # a heap of negated hashes
        self._copies: dict[int, _Copies] = {}  # by hash

    def add(self, source: str, text: str) -> None:
        """Add a document; above the limit, drop the documents with the largest hashes."""
        utf8 = text.encode()
        self.num_documents += 1
        self.num_bytes += len(utf8)
        digest = hashlib.blake2b(utf8, digest_size=8, person=b"zerolm-sample").digest()
        number = int.from_bytes(digest, "big")
        if number >= self._limit_hash:
            return
        if number not in self._copies:
            self._copies[number] = _Copies(text, len(utf8), Counter())
            heapq.heappush(self._largest_first, -number)
        self._copies[number].sources[source] += 1
        self.kept_bytes += len(utf8)
        while self.kept_bytes > self.limit_bytes and len(self._copies) > 1:
            self._limit_hash = -heapq.heappop(self._largest_first)
            self.kept_bytes -= self._copies.pop(self._limit_hash).num_bytes()

    def by_source(self, limit_bytes: float = math.inf) -> dict[str, list[str]]:
        """Return the sampled documents by source, in the order of their hashes.

        Args:
            limit_bytes: maximum size of the returned documents, which may be smaller than the
                sample's.
        """
        found: dict[str, list[str]] = {name: [] for name in self.sources}
        size = 0
        for number in sorted(self._copies):
            copies = self._copies[number]
            size += copies.num_bytes()
            if size > limit_bytes and any(found.values()):
                break
            for source, count in copies.sources.items():
                found[source] += [copies.text] * count
        return found


class _Copies(NamedTuple):
    """A document, and the number of its copies in each source."""

    text: str
    text_bytes: int
    sources: Counter[str]

    def num_bytes(self) -> int:
        return self.text_bytes * self.sources.total()


def source_names(inputs: Sequence[Any]) -> list[str]:
    """Return the names of the sources: the distinct values of --input."""
    return list(dict.fromkeys(each.argument for each in inputs))


def read_texts(
    inputs: Sequence[Any],
    rules: InputRules,
    tally: Tally,
    advance: Callable[[int, int], object],
) -> Iterator[tuple[str, str]]:
    """Yield (source, text) for every document, in reading order.

    Args:
        advance: called with the number of input bytes and the number of documents read.
    """
    for unit in plan_units(inputs):
        for batch in read_batches(inputs, unit, rules, tally):
            advance(batch.input_bytes, len(batch.documents))
            yield from ((inputs[each.input].argument, each.text) for each in batch.documents)
    check_bad_fraction(inputs, tally, rules)
    require_unchanged(inputs)


def add_to_sample(sample: Sample, texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Add each text to the sample under its source, and yield the text."""
    for source, text in texts:
        sample.add(source, text)
        yield text
