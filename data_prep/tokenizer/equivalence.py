"""Tests whether an encoder's ids equal a reference's, and for which code points.

Both encode every likely code point in several contexts, every pair of ASCII characters, the tokens
of the vocabulary, and random texts of many kinds (`data_prep.tokenizer.fuzz_texts`). Non-ASCII code
points that cause a difference are excluded from the proven code points; if there is any other
difference, the encoder is refused. Independent of specific encoders.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from data_prep.tokenizer import fuzz_texts
from data_prep.tokenizer.backends import Encode

CHECK_VERSION = 3  # version of the texts and rules; cached results from other versions are ignored
RANDOM_TEXTS = 5000  # per round, about 1 MB
MAX_VOCABULARY_TEXTS = 20_000
MAX_ROUNDS = 6  # rounds of random texts; the check ends after a round without a difference
MAX_EXCLUDED = 0.5  # fraction of the code points; above it, few documents could use the encoder
MAX_MINIMIZED = 40  # differing texts minimized per round; each takes a few hundred trials
CODE_POINTS_PER_TEXT = 16  # code points tried together, because each call has a fixed cost
CHUNK_CHARACTERS = 1 << 15


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
    different = comparison.differing(fuzz_texts.ascii_texts())
    if different:
        return comparison.refuse(different[0])
    tried = fuzz_texts.likely_code_points()
    excluded: set[int] = set()
    refusal = _try_code_points(comparison, tried, excluded)
    if refusal is not None:
        return refusal
    step = max(1, len(vocabulary) // MAX_VOCABULARY_TEXTS)
    vocabulary_texts = list(fuzz_texts.vocabulary_texts(vocabulary[::step]))
    for number in range(MAX_ROUNDS):
        allowed = [each for each in tried if each not in excluded]
        texts = [*fuzz_texts.random_texts(seed + number, allowed, RANDOM_TEXTS)]
        texts += [text for text in vocabulary_texts if excluded.isdisjoint(map(ord, text))]
        different = comparison.differing(texts)
        if not different:
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
    comparison: "_Comparison", tried: Sequence[int], excluded: set[int]
) -> EquivalenceResult | None:
    """Add the code points that cause a difference to `excluded`.

    Each code point is tried in a text with other code points, and alone if the ids for that text
    differ.

    Returns:
        A refusal if code points do not explain a difference, or if too many would have to be
        excluded.
    """
    for packed in comparison.differing(_packed(tried)):
        inside = sorted(set(map(ord, packed)) - set(range(128)))
        alone = comparison.differing(fuzz_texts.code_point_text(number) for number in inside)
        numbers = {number for number in inside if fuzz_texts.code_point_text(number) in alone}
        if not numbers and not _exclude(comparison, packed, excluded):
            return comparison.refuse(packed)
        excluded |= numbers
        if len(excluded) > MAX_EXCLUDED * len(tried):
            return comparison.refuse(packed)
    return None


class _Comparison:
    """Compares two encoders, and counts the compared texts."""

    def __init__(self, reference: Encode, candidate: Encode):
        self.reference, self.candidate = reference, candidate
        self.num_texts = self.num_bytes = 0
        self._candidate_lock = threading.Lock()

    def differing(self, texts: Iterable[str]) -> list[str]:
        """Return the texts whose ids differ."""
        different: list[str] = []
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for differing, num_texts, num_bytes in pool.map(self._differing, _chunks(texts)):
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
            with self._candidate_lock:  # gigatoken raises "Already borrowed" in a second thread
                ids = self.candidate(texts)
        except Exception:  # a repeatable failure counts as a difference; find its text
            if len(texts) > 1:
                return [each for text in texts for each in self._differing([text])[0]], 1, size
            try:
                with self._candidate_lock:
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


def _packed(numbers: Sequence[int]) -> Iterator[str]:
    for start in range(0, len(numbers), CODE_POINTS_PER_TEXT):
        together = numbers[start : start + CODE_POINTS_PER_TEXT]
        yield "".join(map(fuzz_texts.code_point_text, together))


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
