"""Does one encoder give the ids of another? A proof by trial, and the code points it holds for.

Every likely code point is tried in contexts, every pair of ASCII characters, the vocabulary's own
spellings, and random texts of many kinds. A difference that a code point above ASCII explains
takes that code point out of the proven set; any other difference refuses the encoder. What the
proof rests on is in `data_prep/fuzz_texts.py`. Knows nothing of which encoders there are.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from data_prep import fuzz_texts
from data_prep.backends import Encode

PROOF_VERSION = 1  # of the texts and rules; a proof of another version is made anew
RANDOM_TEXTS = 5000  # about 1 MB
MAX_VOCABULARY = 20_000  # spellings tried
MAX_ROUNDS = 6  # of random texts, until one finds nothing
MAX_EXCLUDED = 0.5  # of the code points: with fewer left, hardly any document would be proven
MAX_MINIMIZED = 40  # differing texts that are minimized, each by some hundred trials
PACKED = 16  # code points a text in the sweep: calls have a price of their own
CHUNK_CHARACTERS = 1 << 15


@dataclass(frozen=True)
class Proof:
    """What trying out two encoders showed."""

    refused: str | None  # why the encoder must not be used; None where it is equal
    proven: tuple[tuple[int, int], ...] = ()  # ranges [start, stop) of code points
    num_excluded: int = 0  # code points that were tried and made a difference
    num_texts: int = 0
    num_bytes: int = 0


def prove(reference: Encode, candidate: Encode, vocabulary: Sequence[str], seed: int = 0) -> Proof:
    """Compare an encoder with the reference; some MB of text, seconds on one core.

    Args:
        vocabulary: spellings of tokens, special ones included.
        seed: of the random texts.
    """
    trial = _Trial(reference, candidate)
    different = trial.differing(fuzz_texts.of_ascii())
    if different:
        return trial.refuse(different[0])
    tried = fuzz_texts.code_points()
    excluded: set[int] = set()
    for packed in trial.differing(_packed(tried)):
        inside = sorted(set(map(ord, packed)) - set(range(128)))
        culprits = trial.differing(fuzz_texts.in_contexts(number) for number in inside)
        numbers = {number for number in inside if fuzz_texts.in_contexts(number) in culprits}
        if not numbers and not _explain(trial, packed, excluded):
            return trial.refuse(packed)
        excluded |= numbers
        if len(excluded) > MAX_EXCLUDED * len(tried):
            return trial.refuse(packed)
    step = max(1, len(vocabulary) // MAX_VOCABULARY)
    spellings = list(fuzz_texts.of_vocabulary(vocabulary[::step]))
    for number in range(MAX_ROUNDS):
        allowed = [each for each in tried if each not in excluded]
        texts = [*fuzz_texts.at_random(seed + number, allowed, RANDOM_TEXTS)]
        texts += [text for text in spellings if excluded.isdisjoint(map(ord, text))]
        different = trial.differing(texts)
        if not different:
            return Proof(
                None,
                _ranges([*range(128), *allowed]),
                len(excluded),
                trial.num_texts,
                trial.num_bytes,
            )
        for text in different[:MAX_MINIMIZED]:
            if excluded.isdisjoint(map(ord, text)) and not _explain(trial, text, excluded):
                return trial.refuse(text)
    return trial.refuse(different[0])


class _Trial:
    """The two encoders, and how much was tried."""

    def __init__(self, reference: Encode, candidate: Encode):
        self.reference, self.candidate = reference, candidate
        self.num_texts = self.num_bytes = 0

    def differing(self, texts: Iterable[str]) -> list[str]:
        """Return the texts whose ids are not the same."""
        different: list[str] = []
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for found, num_texts, num_bytes in pool.map(self._differing, _chunks(texts)):
                different += found
                self.num_texts += num_texts
                self.num_bytes += num_bytes
        return different

    def _differing(self, texts: list[str]) -> tuple[list[str], int, int]:
        size = sum(len(text.encode()) for text in texts)
        right_ids, right_ends = self.reference(texts)
        try:
            ids, ends = self.candidate(texts)
        except Exception:  # a text that it does not take is a difference; find out which
            if len(texts) > 1:
                return [each for text in texts for each in self._differing([text])[0]], 1, size
            return texts, 1, size
        if np.array_equal(ids, right_ids) and np.array_equal(ends, right_ends):
            return [], len(texts), size
        different, start, right_start = [], 0, 0
        for text, end, right_end in zip(texts, ends.tolist(), right_ends.tolist(), strict=True):
            if not np.array_equal(ids[start:end], right_ids[right_start:right_end]):
                different.append(text)
            start, right_start = end, right_end
        return different, len(texts), size

    def refuse(self, text: str) -> Proof:
        """Say for which text the ids differ."""
        text = self.minimize(text)
        sides = []
        for encode in (self.candidate, self.reference):
            try:
                sides.append(str(encode([text])[0][:6].tolist()))
            except Exception as error:
                sides.append(type(error.__cause__ or error).__name__)
        reason = f"gives {sides[0]} for {text[:40]!r} instead of {sides[1]}"
        return Proof(reason, (), 0, self.num_texts, self.num_bytes)

    def minimize(self, text: str) -> str:
        """Return a short part of a text (characters left out) for which the ids still differ."""
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


def _explain(trial: _Trial, text: str, excluded: set[int]) -> bool:
    """Exclude the code points above ASCII that a difference needs; say whether there are any."""
    numbers = {number for number in map(ord, trial.minimize(text)) if number >= 128}
    excluded |= numbers
    return bool(numbers)


def _packed(numbers: Sequence[int]) -> Iterator[str]:
    for start in range(0, len(numbers), PACKED):
        yield "".join(map(fuzz_texts.in_contexts, numbers[start : start + PACKED]))


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
    """Return ascending numbers as ranges [start, stop)."""
    values = np.asarray(numbers)
    breaks = np.flatnonzero(np.diff(values) > 1)
    starts = values[np.concatenate([[0], breaks + 1])]
    stops = values[np.concatenate([breaks, [len(values) - 1]])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))
