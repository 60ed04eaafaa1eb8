"""Encoders: texts to ids by the backend that was chosen, and by the reference where it must.

A document with a code point outside the proven set goes through the reference, and so does one at
which the backend fails; a sample of the others is encoded by both. encoder_choice.py chooses.
Knows nothing of documents' files and of shards.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.backends import BackendFailed, Encode, Ids, flatten, open_backend, reference_backend
from data_prep.encoder_choice import Choice
from zerolm.errors import ZerolmError

CHECKED_ONE_IN = 1000  # documents, by a hash of their length and beginning
CHECKED_CHARACTERS = 1 << 12  # of a document: 8 times as many took 7% of all time with gigatoken
MAX_FAILED = 20  # documents in a process: a backend that fails at more is not asked again
UNICODE_SIZE = 0x110000
ASCII = bytes(range(128))
STEP = 1 << 20  # characters looked at together, so that a giant document needs no giant arrays


class Encoded(NamedTuple):
    """The ids of documents, one after another."""

    ids: np.ndarray  # (N,) uint32
    ends: np.ndarray  # (D,) int64: where each document's ids end
    text_bytes: np.ndarray  # (D,) int64: of each document, as UTF-8


class EncoderError(ZerolmError):
    """A document that no backend can encode, or that a backend gave other ids for."""

    def __init__(self, message: str, document: int):
        super().__init__(message)
        self.document = document  # its index in the texts that were to be encoded


@dataclass
class Encoder:
    """Encodes texts; `counts` says what was done by which backend."""

    directory: Path
    choice: Choice
    # "<backend>.documents" and "<backend>.bytes" (of UTF-8), "checked.documents", and if there are
    # any "failed.documents": those of the reference that the backend could not encode
    counts: Counter[str] = field(default_factory=Counter)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode documents as ordinary text, without special tokens and without truncation.

        Raises:
            EncoderError: a backend's ids of a checked document are not the reference's, or the
                reference cannot encode a document.
        """
        text_bytes, unproven = self._look_at(texts)
        choice, given_up = self.choice, self.counts["failed.documents"] >= MAX_FAILED
        if choice.backend == choice.reference or len(unproven) == len(texts) or given_up:
            ids, ends = self._by_reference(texts, text_bytes)
            return Encoded(ids, ends, text_bytes)
        if unproven:
            ids, ends, others = self._by_both(texts, text_bytes, unproven)
        else:
            ids, ends, others = self._by_backend(texts, text_bytes)
        self._check(texts, ids, ends, set(others))
        return Encoded(ids, ends, text_bytes)

    def counters(self) -> dict[str, int]:
        """Return `counts` so far, as sums that may be added up over workers."""
        return dict(sorted(self.counts.items()))

    def _look_at(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """Return the UTF-8 bytes of each text, and which texts have an unproven code point."""
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        above_ascii = {}
        for number, text in enumerate(texts):
            if not text.isascii():
                utf8 = text.encode()
                sizes[number] = len(utf8)
                if self.choice.backend != self.choice.reference:
                    above_ascii[number] = utf8.translate(None, ASCII)
        if not above_ascii or self._is_proven(b"".join(above_ascii.values())):
            return sizes, []
        return sizes, [number for number, rest in above_ascii.items() if not self._is_proven(rest)]

    def _is_proven(self, utf8: bytes) -> bool:
        text = utf8.decode()
        for start in range(0, len(text), STEP):
            part = text[start : start + STEP].encode("utf-32-le")
            if not self._table[np.frombuffer(part, np.uint32)].all():
                return False
        return True

    def _by_reference(self, texts: Sequence[str], text_bytes: np.ndarray) -> Ids:
        self._count(self.choice.reference, text_bytes)
        try:
            return self._reference(texts)
        except BackendFailed:  # one text is enough, so find out which
            return flatten([self._alone(number, text) for number, text in enumerate(texts)])

    def _alone(self, number: int, text: str) -> np.ndarray:
        """Return the reference's ids of one text."""
        try:
            return self._reference([text])[0]
        except BackendFailed as failure:
            raise EncoderError(
                f"encoder {self.choice.reference}: fails at a document ({failure}), and nothing "
                f"can take its place. The document begins {text[:60]!r}. Nothing was published: "
                f"remove the document, and start again.",
                number,
            ) from failure

    def _by_backend(
        self, texts: Sequence[str], text_bytes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return ids, where each text's end, and which texts the reference had to encode."""
        failed: list[int] = []
        try:
            ids, ends = self._fast(texts)
        except BackendFailed:
            pieces = [self._attempt(text) for text in texts]
            failed = [number for number, piece in enumerate(pieces) if piece is None]
            self.counts["failed.documents"] += len(failed)
            self._count(self.choice.reference, text_bytes[failed])
            ids, ends = flatten(
                [
                    self._alone(number, text) if piece is None else piece
                    for number, (text, piece) in enumerate(zip(texts, pieces, strict=True))
                ]
            )
        self._count(self.choice.backend, np.delete(text_bytes, failed))
        return ids, ends, failed

    def _attempt(self, text: str) -> np.ndarray | None:
        """Return the fast backend's ids of one text, None where it fails."""
        try:
            return self._fast([text])[0]
        except BackendFailed:
            return None

    def _by_both(
        self, texts: Sequence[str], text_bytes: np.ndarray, unproven: list[int]
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return the same as `_by_backend`; the reference encodes those that are unproven too."""
        proven = sorted(set(range(len(texts))) - set(unproven))
        ids, ends = self._by_reference([texts[each] for each in unproven], text_bytes[unproven])
        pieces = dict(zip(unproven, np.split(ids, ends[:-1]), strict=True))
        ids, ends, failed = self._by_backend([texts[each] for each in proven], text_bytes[proven])
        pieces.update(zip(proven, np.split(ids, ends[:-1]), strict=True))
        ids, ends = flatten([pieces[number] for number in range(len(texts))])
        return ids, ends, unproven + [proven[each] for each in failed]

    def _count(self, name: str, text_bytes: np.ndarray) -> None:
        if len(text_bytes):
            self.counts[f"{name}.documents"] += len(text_bytes)
            self.counts[f"{name}.bytes"] += int(text_bytes.sum())

    def _check(
        self, texts: Sequence[str], ids: np.ndarray, ends: np.ndarray, others: set[int]
    ) -> None:
        """Compare a sample of what the fast backend encoded; `others` it did not."""
        for number, text in enumerate(texts):
            beginning = text[:64].encode()
            if zlib.crc32(beginning, len(text)) % CHECKED_ONE_IN or number in others:
                continue
            own = ids[int(ends[number - 1]) if number else 0 : ends[number]]
            if len(text) > CHECKED_CHARACTERS:
                text = text[:CHECKED_CHARACTERS]
                beginning_ids = self._attempt(text)
                if beginning_ids is None:
                    continue
                own = beginning_ids
            self.counts["checked.documents"] += 1
            right = self._alone(number, text)
            if not np.array_equal(own, right):
                raise self._mismatch(number, text, own, right)

    def _mismatch(self, number: int, text: str, ids: np.ndarray, right: np.ndarray) -> EncoderError:
        common = min(len(ids), len(right))
        differ = np.flatnonzero(ids[:common] != right[:common])
        first = int(differ[0]) if len(differ) else common
        choice = self.choice
        return EncoderError(
            f"encoder {choice.backend} {choice.version}: its ids of a document are not those of "
            f"{choice.reference}, from token {first} on ({ids[first : first + 3].tolist()} "
            f"instead of {right[first : first + 3].tolist()}). The document begins "
            f"{text[:60]!r}. Nothing was published: start again with "
            f"--encoder {choice.reference}.",
            number,
        )

    @cached_property
    def _fast(self) -> Encode:
        return open_backend(self.choice.backend, self.directory)

    @cached_property
    def _reference(self) -> Encode:  # loaded when the first document needs it
        return open_backend(self.choice.reference, self.directory)

    @cached_property
    def _table(self) -> np.ndarray:
        table = np.zeros(UNICODE_SIZE, bool)
        for start, stop in self.choice.proven:
            table[start:stop] = True
        return table


def load_encoder(directory: Path, choice: Choice | None = None) -> Encoder:
    """Return an encoder of a tokenizer's copy; without a choice, the reference alone."""
    if choice is None:
        reference = reference_backend(directory)
        choice = Choice(reference, reference)
    encoder = Encoder(directory, choice)
    encoder.encode([""])  # what cannot be loaded fails here
    encoder.counts.clear()
    return encoder
