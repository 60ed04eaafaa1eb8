"""Encoders: texts to ids by the fastest backend that is proven to give the reference's ids.

`choose_backend` runs once, in the process that starts the others; `load_encoder` runs in every
worker. A document with a code point outside the proven set goes through the reference, and a
sample of the others is encoded by both. Knows nothing of documents' files and of shards.
"""

import dataclasses
import hashlib
import json
import os
import platform
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.backends import (
    BACKENDS,
    FAST_BACKENDS,
    ID_FILES,
    BackendRefused,
    Encode,
    installed_version,
    open_backend,
    reference_backend,
    special_tokens,
    spellings,
)
from data_prep.equality import PROOF_VERSION, Proof, prove
from zerolm.errors import ConfigError, ZerolmError, did_you_mean
from zerolm.files import write_json

CHECKED_ONE_IN = 1000  # documents, by a hash of their length and beginning
CHECKED_CHARACTERS = 1 << 15  # of a document: checking the longest costs no more
# Below this, encoding by `tokenizers` takes less time than the proof: 3 CPU seconds (measured on 2
# cores of AMD EPYC, 2026-11-21), the time in which it encodes 7 MB on each core.
PROOF_BYTES = 16 << 20
UNICODE_SIZE = 0x110000
STEP = 1 << 20  # characters looked at together, so that a giant document needs no giant arrays


class Encoded(NamedTuple):
    """The ids of documents, one after another."""

    ids: np.ndarray  # (N,) uint32
    ends: np.ndarray  # (D,) int64: where each document's ids end


class EncoderError(ZerolmError):
    """A backend gave other ids than the reference for a document."""

    def __init__(self, message: str, document: int):
        super().__init__(message)
        self.document = document  # its index in the texts that were to be encoded


@dataclass(frozen=True)
class Choice:
    """Which backend encodes; picklable and small, made once and sent to the workers."""

    backend: str  # one of backends.BACKENDS
    reference: str  # the backend whose ids are right by definition
    version: str | None = None
    proven: tuple[tuple[int, int], ...] = ()  # ranges [start, stop) of code points
    notes: tuple[str, ...] = ()  # for people: why others are not used

    def record(self) -> dict[str, Any]:
        """Return the entry of a manifest."""
        return {
            "backend": self.backend,
            "version": self.version,
            "reference": self.reference,
            "proven_code_points": sum(stop - start for start, stop in self.proven),
        }


@dataclass
class Encoder:
    """Encodes texts; `counts` says what was done by which backend."""

    directory: Path
    choice: Choice
    # "<backend>.documents" and "<backend>.bytes" (of UTF-8), "checked.documents"
    counts: Counter[str] = field(default_factory=Counter)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode documents as ordinary text, without special tokens and without truncation.

        Raises:
            EncoderError: a backend's ids of a checked document are not the reference's.
        """
        if self.choice.backend == self.choice.reference:
            return self._run(self.choice.reference, self._reference, texts)
        unproven = self._unproven(texts)
        if not unproven:
            encoded = self._run(self.choice.backend, self._fast, texts)
        elif len(unproven) == len(texts):
            return self._run(self.choice.reference, self._reference, texts)
        else:
            encoded = self._encode_by_both(texts, unproven)
        self._check(texts, encoded, set(unproven))
        return encoded

    def counters(self) -> dict[str, int]:
        """Return `counts` so far, as sums that may be added up over workers."""
        return dict(sorted(self.counts.items()))

    def _encode_by_both(self, texts: Sequence[str], unproven: list[int]) -> Encoded:
        is_unproven = np.zeros(len(texts), bool)
        is_unproven[unproven] = True
        others = np.flatnonzero(~is_unproven)
        lengths = np.empty(len(texts), np.int64)
        pieces: list[np.ndarray] = [np.empty(0)] * len(texts)
        for name, encode, numbers in (
            (self.choice.reference, self._reference, unproven),
            (self.choice.backend, self._fast, others.tolist()),
        ):
            ids, ends = self._run(name, encode, [texts[number] for number in numbers])
            for number, piece in zip(numbers, np.split(ids, ends[:-1]), strict=True):
                pieces[number] = piece
                lengths[number] = len(piece)
        return Encoded(np.concatenate(pieces), np.cumsum(lengths))

    def _run(self, name: str, encode: Encode, texts: Sequence[str]) -> Encoded:
        self.counts[f"{name}.documents"] += len(texts)
        self.counts[f"{name}.bytes"] += sum(
            len(text) if text.isascii() else len(text.encode()) for text in texts
        )
        return Encoded(*encode(texts))

    def _unproven(self, texts: Sequence[str]) -> list[int]:
        """Return which texts have a code point that is not proven (all of ASCII is)."""
        numbers = [number for number, text in enumerate(texts) if not text.isascii()]
        if not numbers or self._is_proven("".join([texts[number] for number in numbers])):
            return []
        return [number for number in numbers if not self._is_proven(texts[number])]

    def _is_proven(self, text: str) -> bool:
        for start in range(0, len(text), STEP):
            part = text[start : start + STEP].encode("utf-32-le")
            if not self._table[np.frombuffer(part, np.uint32)].all():
                return False
        return True

    def _check(self, texts: Sequence[str], encoded: Encoded, unproven: set[int]) -> None:
        for number, text in enumerate(texts):
            beginning = text[:64].encode()
            if zlib.crc32(beginning, len(text)) % CHECKED_ONE_IN or number in unproven:
                continue
            start = int(encoded.ends[number - 1]) if number else 0
            ids = encoded.ids[start : encoded.ends[number]]
            if len(text) > CHECKED_CHARACTERS:
                text = text[:CHECKED_CHARACTERS]
                ids = self._fast([text])[0]
            self.counts["checked.documents"] += 1
            right = self._reference([text])[0]
            if not np.array_equal(ids, right):
                raise self._mismatch(number, text, ids, right)

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


def choose_backend(
    directory: Path, backend: str = "auto", input_bytes: int | None = None
) -> Choice:
    """Choose the backend for a tokenizer's copy; seconds, where equality has to be proven first.

    Args:
        backend: one of `backends.BACKENDS`, or "auto" for the fastest that is proven.
        input_bytes: of what is to be encoded; a proof that costs more than it saves is left out.

    Raises:
        ConfigError: a backend asked for by name that cannot be used.
    """
    reference = reference_backend(directory)
    if backend not in ("auto", *BACKENDS):
        raise ConfigError(
            f"--encoder {backend}: is not one of auto, {', '.join(BACKENDS)}."
            f"{did_you_mean(backend, BACKENDS)}"
        )
    names: tuple[str, ...] = (backend,)
    if backend == "auto":
        names = FAST_BACKENDS if reference != "transformers" else ()
    small = backend == "auto" and input_bytes is not None and input_bytes < PROOF_BYTES
    notes = []
    for name in names:
        if name == reference:
            break
        try:
            proof = _proof(directory, name, reference, only_known=small)
        except BackendRefused as refusal:
            notes.append(f"{name} {refusal}")
            continue
        if proof is None:
            notes.append(f"{name} is not proven equal yet: the input is small")
        elif proof.refused:
            notes.append(f"{name} {proof.refused}")
        else:
            return Choice(name, reference, installed_version(name), proof.proven, tuple(notes))
    if backend not in ("auto", reference):
        raise ConfigError(
            f"--encoder {backend}: cannot be used for this tokenizer: {notes[0]}. "
            f"Use --encoder auto or --encoder {reference}."
        )
    return Choice(reference, reference, installed_version(reference), (), tuple(notes))


def _proof(directory: Path, name: str, reference: str, only_known: bool) -> Proof | None:
    """Return the proof for a backend: a known one, or a new one unless `only_known`."""
    candidate = open_backend(name, directory)
    path = _cache_directory() / f"{_key(directory, name, reference)}.json"
    known = _read_proof(path)
    if known is None and not only_known:
        texts = dict.fromkeys([*special_tokens(directory), *spellings(directory).values()])
        proof = prove(open_backend(reference, directory), candidate, [*filter(None, texts)])
        with suppress(OSError):  # a home that cannot be written: the next run proves it again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, dataclasses.asdict(proof))
        return proof
    return known


def _read_proof(path: Path) -> Proof | None:
    try:
        content = json.loads(path.read_bytes())
        proven = tuple((int(start), int(stop)) for start, stop in content.pop("proven"))
        return Proof(proven=proven, **content)
    except (OSError, ValueError, KeyError, TypeError):  # none, or another version's
        return None


def _key(directory: Path, name: str, reference: str) -> str:
    """Return a digest of everything that a proof depends on."""
    digest = hashlib.sha256()
    for part in (
        f"proof {PROOF_VERSION}, Unicode {unicodedata.unidata_version}, {platform.machine()}",
        *(f"{each} {installed_version(each)}" for each in (name, reference)),
    ):
        digest.update(part.encode() + b"\n")
    for file in ID_FILES:
        if (directory / file).is_file():
            digest.update(file.encode() + (directory / file).read_bytes())
    return digest.hexdigest()[:40]


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "zerolm" / "encoders"
