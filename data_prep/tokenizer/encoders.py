"""`Encoder`: encodes texts with the chosen backend, and with the reference where necessary.

The reference encodes documents with a code point outside the proven set, documents on which the
backend fails, and a sample of the rest to check the backend. `data_prep.tokenizer.encoder_choice`
chooses the backend. Independent of input files and shards.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.tokenizer.backends import (
    UTF8_BACKENDS,
    BackendFailed,
    Encode,
    Ids,
    open_backend,
    reference_backend,
)
from data_prep.tokenizer.encoder_choice import EncoderChoice
from data_prep.tokenizer.vocabulary import forget_definition
from zerolm.common.errors import ZerolmError

CHECK_ONE_IN = 1000  # check one document in 1000, selected by a hash of its length and beginning
# Only the beginning of a document is checked: with gigatoken, checking 8 times as much took 7% of
# the total time.
MAX_CHECKED_CHARACTERS = 1 << 12
MAX_FAILED_DOCUMENTS = 20  # per process; after that many, the backend is no longer used
UNICODE_SIZE = 0x110000
ASCII = bytes(range(128))
SCAN_CHARACTERS = 1 << 20  # scanned at a time, to avoid giant arrays for a giant document

Text = str | bytes  # bytes: in UTF-8


class Encoded(NamedTuple):
    """The ids of documents."""

    ids: Ids
    text_bytes: np.ndarray  # (D,) int64: the UTF-8 size of each document


class EncoderError(ZerolmError):
    """No backend can encode a document, or a backend's ids for a document are wrong."""

    def __init__(self, message: str, document: int):
        super().__init__(message)
        self.document = document  # index of the document among the texts passed to `encode`


@dataclass
class Encoder:
    """Encodes texts with the chosen backend.

    Attributes:
        directory: the tokenizer's saved copy.
        counts: "<backend>.documents" and "<backend>.bytes" (UTF-8) for each backend;
            "checked.documents"; and "failed.documents", the number that the reference encoded
            because the backend failed.
    """

    directory: Path
    choice: EncoderChoice
    counts: Counter[str] = field(default_factory=Counter)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode documents as ordinary text, without special tokens and without truncation.

        Raises:
            EncoderError: a checked document's ids differ from the reference's, or the reference
                cannot encode a document.
        """
        text_bytes, given, unproven = self._scan(texts)
        choice, gave_up = self.choice, self.counts["failed.documents"] >= MAX_FAILED_DOCUMENTS
        if choice.backend == choice.reference or len(unproven) == len(texts) or gave_up:
            return Encoded(self._encode_by_reference(texts, text_bytes), text_bytes)
        if unproven:
            ids, by_reference = self._encode_by_both(given, text_bytes, unproven)
        else:
            ids, by_reference = self._encode_by_backend(given, text_bytes)
        self._check(texts, ids, set(by_reference))
        return Encoded(ids, text_bytes)

    def _scan(self, texts: Sequence[str]) -> tuple[np.ndarray, list[Text], list[int]]:
        """Prepare texts; return their UTF-8 sizes, the texts as passed to the backend, and which of
        them contain code points that are not proven.
        """
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        above_ascii, given = {}, list[Text](texts)
        for number, text in enumerate(texts):
            if not text.isascii():
                utf8 = text.encode()
                sizes[number] = len(utf8)
                if self.choice.backend != self.choice.reference:
                    above_ascii[number] = utf8.translate(None, ASCII)
                    if self.choice.backend in UTF8_BACKENDS:
                        given[number] = utf8
        unproven: list[int] = []
        if above_ascii and not self._is_proven(b"".join(above_ascii.values())):
            unproven = [each for each, rest in above_ascii.items() if not self._is_proven(rest)]
        return sizes, given, unproven

    def _is_proven(self, utf8: bytes) -> bool:
        text = utf8.decode()
        for start in range(0, len(text), SCAN_CHARACTERS):
            part = text[start : start + SCAN_CHARACTERS].encode("utf-32-le")
            if not self._is_proven_code_point[np.frombuffer(part, np.uint32)].all():
                return False
        return True

    def _encode_by_reference(self, given: Sequence[Text], text_bytes: np.ndarray) -> Ids:
        self._count(self.choice.reference, text_bytes)
        texts = [_decoded(text) for text in given]
        try:
            return self._reference(texts)
        except BackendFailed:  # find the text
            return [self._encode_one_by_reference(*each) for each in enumerate(texts)]

    def _encode_one_by_reference(self, number: int, text: str) -> np.ndarray:
        """Encode one text with the reference."""
        try:
            return self._reference([text])[0]
        except BackendFailed as failure:
            raise EncoderError(
                f"encoder {self.choice.reference}: fails on a document ({failure}), and no other "
                f"backend can replace it. The document begins {text[:60]!r}. Nothing was "
                f"published. Remove the document and start again.",
                number,
            ) from failure

    def _encode_by_backend(
        self, texts: Sequence[Text], text_bytes: np.ndarray
    ) -> tuple[Ids, list[int]]:
        """Encode texts; return the ids, and which texts were encoded by the reference."""
        try:
            ids = self._fast(texts)
        except BackendFailed:
            tried = [self._try_backend(text) for text in texts]
            failed = [number for number, each in enumerate(tried) if each is None]
            self.counts["failed.documents"] += len(failed)
            self._count(self.choice.reference, text_bytes[failed])
            self._count(self.choice.backend, np.delete(text_bytes, failed))
            return [
                self._encode_one_by_reference(number, _decoded(texts[number]))
                if each is None
                else each
                for number, each in enumerate(tried)
            ], failed
        self._count(self.choice.backend, text_bytes)
        return ids, []

    def _try_backend(self, text: Text) -> np.ndarray | None:
        """Encode one text with the fast backend; return None if that fails."""
        try:
            return self._fast([text])[0]
        except BackendFailed:
            return None

    def _encode_by_both(
        self, texts: Sequence[Text], text_bytes: np.ndarray, unproven: list[int]
    ) -> tuple[Ids, list[int]]:
        """Encode like `_encode_by_backend`, but encode unproven texts with the reference."""
        proven = sorted(set(range(len(texts))) - set(unproven))
        by_reference = self._encode_by_reference(
            [texts[each] for each in unproven], text_bytes[unproven]
        )
        by_backend, failed = self._encode_by_backend(
            [texts[each] for each in proven], text_bytes[proven]
        )
        ids = dict(zip([*unproven, *proven], [*by_reference, *by_backend], strict=True))
        return [ids[number] for number in range(len(texts))], [
            *unproven,
            *(proven[each] for each in failed),
        ]

    def _count(self, name: str, text_bytes: np.ndarray) -> None:
        if len(text_bytes):
            self.counts[f"{name}.documents"] += len(text_bytes)
            self.counts[f"{name}.bytes"] += int(text_bytes.sum())

    def _check(self, texts: Sequence[str], ids: Ids, by_reference: set[int]) -> None:
        """Check a sample of the fast backend's results against the reference."""
        for number, text in enumerate(texts):
            beginning = text[:64].encode()
            if zlib.crc32(beginning, len(text)) % CHECK_ONE_IN or number in by_reference:
                continue
            actual = ids[number]
            if len(text) > MAX_CHECKED_CHARACTERS:
                text = text[:MAX_CHECKED_CHARACTERS]
                beginning_ids = self._try_backend(text)
                if beginning_ids is None:
                    continue
                actual = beginning_ids
            self.counts["checked.documents"] += 1
            expected = self._encode_one_by_reference(number, text)
            if not np.array_equal(actual, expected):
                raise self._mismatch(number, text, actual, expected)

    def _mismatch(
        self, number: int, text: str, actual: np.ndarray, expected: np.ndarray
    ) -> EncoderError:
        common = min(len(actual), len(expected))
        differ = np.flatnonzero(actual[:common] != expected[:common])
        first = int(differ[0]) if len(differ) else common
        choice = self.choice
        return EncoderError(
            f"encoder {choice.backend} {choice.version}: its ids for a document differ from those "
            f"of {choice.reference}, starting at token {first} "
            f"({actual[first : first + 3].tolist()} instead of "
            f"{expected[first : first + 3].tolist()}). The document begins {text[:60]!r}. Nothing "
            f"was published. Start again with --encoder {choice.reference}.",
            number,
        )

    @cached_property
    def _fast(self) -> Encode:
        return open_backend(self.choice.backend, self.directory)

    @cached_property
    def _reference(self) -> Encode:
        return open_backend(self.choice.reference, self.directory)

    @cached_property
    def _is_proven_code_point(self) -> np.ndarray:
        table = np.zeros(UNICODE_SIZE, bool)
        for start, stop in self.choice.proven:
            table[start:stop] = True
        return table


def _decoded(text: Text) -> str:
    return text if isinstance(text, str) else text.decode()


def load_encoder(directory: Path, choice: EncoderChoice | None = None) -> Encoder:
    """Return an encoder for a tokenizer's saved copy; by default, it uses only the reference."""
    if choice is None:
        reference = reference_backend(directory)
        choice = EncoderChoice(reference, reference)
    encoder = Encoder(directory, choice)
    encoder.encode([""])  # load the backend now, or fail here
    encoder.counts.clear()
    forget_definition()
    return encoder
