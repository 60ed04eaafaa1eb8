"""Samples documents by a hash of their text, independently of their order and files.

Of each source the sample keeps the documents with the smallest hashes, up to the source's share of
the bytes. So memory is bounded by the sample size, copies of a document are sampled together, and a
larger sample contains a smaller one.
"""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from data_prep.read.bad_input import Tally, check_bad_fraction
from data_prep.read.documents import InputRules
from data_prep.read.work_units import plan_units, read_batches


class Sample:
    """The documents of one source with the smallest hashes, at most `limit_bytes` of UTF-8."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.num_documents = self.num_bytes = 0  # of all documents added
        self.kept_bytes = 0
        self._heap: list[tuple[int, int, str]] = []  # (-hash, bytes, text): largest hash first

    def add(self, text: str) -> None:
        """Add a document, and drop those with the largest hashes beyond the limit."""
        utf8 = text.encode()
        self.num_documents += 1
        self.num_bytes += len(utf8)
        digest = hashlib.blake2b(utf8, digest_size=8, person=b"zerolm-sample").digest()
        order = -int.from_bytes(digest, "big")
        if self.kept_bytes >= self.limit_bytes and self._heap and order <= self._heap[0][0]:
            return
        heapq.heappush(self._heap, (order, len(utf8), text))
        self.kept_bytes += len(utf8)
        while self.kept_bytes > self.limit_bytes and len(self._heap) > 1:
            self.kept_bytes -= heapq.heappop(self._heap)[1]

    def texts(self) -> list[str]:
        """Return the documents in the order of their hashes."""
        return [text for _, _, text in sorted(self._heap, reverse=True)]


def source_names(inputs: Sequence[Any]) -> list[str]:
    """Return the names of the sources: the distinct values of --input."""
    return list(dict.fromkeys(each.argument for each in inputs))


def make_samples(inputs: Sequence[Any], sample_bytes: int) -> dict[str, Sample]:
    """Return an empty sample per source; they divide the bytes in proportion to file sizes."""
    names = source_names(inputs)
    sizes = {name: [each.size_bytes for each in inputs if each.argument == name] for name in names}
    if any(None in each for each in sizes.values()):  # a hub dataset: its size is unknown
        return {name: Sample(sample_bytes // len(names)) for name in names}
    total = max(1, sum(map(sum, sizes.values())))
    return {name: Sample(sample_bytes * sum(sizes[name]) // total) for name in names}


def read_texts(
    inputs: Sequence[Any],
    rules: InputRules,
    tally: Tally,
    advance: Callable[[int, int], object],
) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of every document, in reading order.

    Args:
        advance: called with the numbers of input bytes and documents read.

    Raises:
        ConfigError: bad input that `rules` do not allow.
    """
    for unit in plan_units(inputs):
        for batch in read_batches(inputs, unit, rules, tally):
            advance(batch.input_bytes, len(batch.documents))
            yield from ((inputs[each.input].argument, each.text) for each in batch.documents)
    check_bad_fraction(inputs, tally, rules)


def add_to_samples(samples: dict[str, Sample], texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Add each (source, text) to the sample of its source, and yield the text."""
    for source, text in texts:
        samples[source].add(text)
        yield text
