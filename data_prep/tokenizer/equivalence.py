"""Tests whether an encoder's ids equal a reference's, and for which code points.

Both encode every likely code point in several contexts, every pair of ASCII characters, the tokens
of the vocabulary, and random texts of many kinds (`data_prep.tokenizer.fuzz_texts`). Non-ASCII code
points that cause a difference are excluded from the proven code points; if there is any other
difference, the encoder is refused. Independent of specific encoders.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from data_prep.tasks.workers import can_fork, ordered_map
from data_prep.tokenizer import fuzz_texts
from data_prep.tokenizer.backends import BackendFailed, Encode

CHECK_VERSION = 4  # version of the texts and rules; cached results from other versions are ignored
RANDOM_TEXTS = 5000  # per round, about 1 MB
MAX_VOCABULARY_TEXTS = 20_000
MAX_ROUNDS = 6  # rounds of random texts; the check ends after a round without a difference
MAX_EXCLUDED = 0.5  # fraction of the code points; above it, few documents could use the encoder
MAX_MINIMIZED = 40  # differing texts minimized per round; each takes a few hundred trials
TEXTS_TOGETHER = 32  # short texts are tried together, because each call has a fixed cost
PARTS = 8  # of the texts of a kind, which processes share
CHUNK_CHARACTERS = 1 << 15

T = TypeVar("T")
MakeTexts = Callable[[], Iterable[str]]


@dataclass(frozen=True)
class EquivalenceResult:
    """The result of comparing two encoders; a cache file has these fields.

    Attributes:
        refused: why the encoder must not be used; None if it is equivalent.
        proven: ranges [start, stop) of code points for which no difference was found.
        num_excluded: number of code points that caused a difference.
    """

    refused: str | None
    proven: tuple[tuple[int, int], ...] = ()
    num_excluded: int = 0
    num_texts: int = 0
    num_bytes: int = 0


def check_equivalence(
    reference: Encode, candidate: Encode, vocabulary: Sequence[str], seed: int = 0
) -> EquivalenceResult:
    """Compare an encoder with the reference on several MB of text; this takes seconds on one core.

    Args:
        vocabulary: the texts of all tokens, including special tokens.
    """
    comparison = _Comparison(reference, candidate)
    tried = fuzz_texts.likely_code_points()
    step = max(1, len(vocabulary) // MAX_VOCABULARY_TEXTS)
    tokens = vocabulary[::step]
    excluded: set[int] = set()

    def other_texts(number: int) -> list[MakeTexts]:
        """Return the texts of a round: random ones, and those of the vocabulary."""
        allowed = [each for each in tried if each not in excluded]
        chosen = [each for each in tokens if excluded.isdisjoint(map(ord, each + each.upper()))]
        texts = _slices(fuzz_texts.vocabulary_texts(chosen))
        seeds = range((seed + number) * PARTS, (seed + number + 1) * PARTS)
        count = RANDOM_TEXTS // PARTS
        return [
            *(partial(fuzz_texts.random_texts, each, allowed, count) for each in seeds),
            *(partial(_together, each) for each in texts),
        ]

    code_points = [partial(_packed, each) for each in _slices(tried)]
    found = comparison.differing([fuzz_texts.ascii_texts, *code_points, *other_texts(0)])
    if found[0]:
        return comparison.refuse(found[0][0])
    differing = [text for texts in found[1 : 1 + len(code_points)] for text in texts]
    refusal = _try_code_points(comparison, differing, len(tried), excluded)
    if refusal is not None:
        return refusal
    found = found[1 + len(code_points) :]
    for number in range(MAX_ROUNDS):
        if number or excluded:  # the texts of the first round were made without exclusions
            found = comparison.differing(other_texts(number))
        different = [text for texts in found for text in texts]
        if not different:
            allowed = [each for each in tried if each not in excluded]
            return EquivalenceResult(
                None,
                _ranges([*range(128), *allowed]),
                len(excluded),
                comparison.num_texts,
                comparison.num_bytes,
            )
        for text in different[:MAX_MINIMIZED]:
            if excluded.isdisjoint(map(ord, text)) and not _exclude(comparison, text, excluded):
                return comparison.refuse(text)
    return comparison.refuse(different[0])


def _try_code_points(
    comparison: "_Comparison", differing: Sequence[str], num_tried: int, excluded: set[int]
) -> EquivalenceResult | None:
    """Add the code points that cause a difference to `excluded`.

    Args:
        differing: texts of several code points whose ids differ; now each is tried alone.

    Returns:
        A refusal if code points do not explain a difference, or if too many would have to be
        excluded.
    """
    for packed in differing:
        inside = sorted(set(map(ord, packed)) - set(range(128)))
        alone = comparison.compare(map(fuzz_texts.code_point_text, inside))
        numbers = {number for number in inside if fuzz_texts.code_point_text(number) in alone}
        if not numbers and not _exclude(comparison, packed, excluded):
            return comparison.refuse(packed)
        excluded |= numbers
        if len(excluded) > MAX_EXCLUDED * num_tried:
            return comparison.refuse(packed)
    return None


class _Answer(NamedTuple):
    differing: list[str]
    num_texts: int
    num_bytes: int
    error: str | None = None


class _Comparison:
    """Compares two encoders, and counts the compared texts."""

    def __init__(self, reference: Encode, candidate: Encode):
        self.reference, self.candidate = reference, candidate
        self.num_texts = self.num_bytes = 0

    def differing(self, parts: Sequence[MakeTexts]) -> list[list[str]]:
        """Return the texts of each part whose ids differ; each core has a process that compares."""
        order = sorted(range(len(parts)), key=lambda part: part % PARTS)  # of all kinds in turn
        num_workers = min(len(os.sched_getaffinity(0)), len(parts))
        if num_workers == 1 or not can_fork():
            found = [self._answer(parts, part) for part in order]
        else:
            found = [*ordered_map(lambda: partial(self._answer, parts), order, num_workers)]
        answers = dict(zip(order, found, strict=True))
        for _, num_texts, num_bytes, error in found:
            if error is not None:
                raise BackendFailed(error)
            self.num_texts += num_texts
            self.num_bytes += num_bytes
        return [answers[part].differing for part in range(len(parts))]

    def _answer(self, parts: Sequence[MakeTexts], part: int) -> "_Answer":
        """Compare a part, in this process or in one of its own."""
        alone = _Comparison(self.reference, self.candidate)
        try:
            return _Answer(alone.compare(parts[part]()), alone.num_texts, alone.num_bytes)
        except BackendFailed as failure:
            return _Answer([], 0, 0, str(failure))

    def compare(self, texts: Iterable[str]) -> list[str]:
        """Return the texts whose ids differ."""
        different: list[str] = []
        for chunk in _chunks(texts):
            differing, num_texts, num_bytes = self._differing(chunk)
            different += differing
            self.num_texts += num_texts
            self.num_bytes += num_bytes
        return different

    def _differing(self, texts: list[str]) -> tuple[list[str], int, int]:
        """Compare the ids for all texts; return the texts whose ids differ, and the numbers of
        texts and bytes compared.
        """
        size = sum(len(text.encode()) for text in texts)
        expected = self.reference(texts)
        try:
            ids = self.candidate(texts)
        except Exception:  # a repeatable failure counts as a difference; find its text
            if len(texts) > 1:
                return [each for text in texts for each in self._differing([text])[0]], 1, size
            try:
                ids = self.candidate(texts)
            except Exception:
                return texts, 1, size
        different = [
            text
            for text, actual, right in zip(texts, ids, expected, strict=True)
            if actual.tobytes() != right.tobytes()
        ]
        return different, len(texts), size

    def refuse(self, text: str) -> EquivalenceResult:
        """Return a refusal that shows a minimal text for which the ids differ."""
        text = self.minimize(text)
        outcomes = []
        for encode in (self.candidate, self.reference):
            try:
                outcomes.append(str(encode([text])[0][:6].tolist()))
            except Exception as error:
                outcomes.append(type(error.__cause__ or error).__name__)
        reason = f"gives {outcomes[0]} for {text[:40]!r} instead of {outcomes[1]}"
        return EquivalenceResult(reason, (), 0, self.num_texts, self.num_bytes)

    def minimize(self, text: str) -> str:
        """Remove characters from a text as long as its ids still differ."""
        size = max(1, len(text) // 2)
        while True:
            start = 0
            while start < len(text):
                shorter = text[:start] + text[start + size :]
                if shorter and self._differing([shorter])[0]:
                    text = shorter
                else:
                    start += size
            if size == 1:
                return text
            size = max(1, size // 2)


def _exclude(comparison: _Comparison, text: str, excluded: set[int]) -> bool:
    """Exclude the non-ASCII code points that cause a difference; return whether any were found."""
    numbers = {number for number in map(ord, comparison.minimize(text)) if number >= 128}
    excluded |= numbers
    return bool(numbers)


def _slices(items: Iterable[T]) -> list[list[T]]:
    """Divide items into parts, each of which has some from everywhere."""
    items = list(items)
    return [items[start::PARTS] for start in range(PARTS)]


def _packed(numbers: Sequence[int]) -> Iterator[str]:
    return _together(map(fuzz_texts.code_point_text, numbers))


def _together(texts: Iterable[str]) -> Iterator[str]:
    remaining = iter(texts)
    while chunk := [*itertools.islice(remaining, TEXTS_TOGETHER)]:
        yield "".join(chunk)


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text) + 16
        if size > CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _ranges(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Convert ascending numbers to ranges [start, stop)."""
    values = np.asarray(numbers)
    breaks = np.flatnonzero(np.diff(values) > 1)
    starts = values[np.concatenate([[0], breaks + 1])]
    stops = values[np.concatenate([breaks, [len(values) - 1]])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))
