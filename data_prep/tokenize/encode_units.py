"""Documents to parts: what a task of `tokenize.encode` does with its unit of the input.

A task reads its unit from the files themselves and writes parts (data_prep/parts.py); nothing but
its record goes to another process. How units are read and which encoder encodes is handed over by
data_prep/tokenization.py. What is in the parts depends on the documents and the tokenizer only.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep import parts
from data_prep.bad_input import Tally
from data_prep.documents import Document, InputRules, Position
from data_prep.progress import TaskProgress
from data_prep.readers import Input
from data_prep.units import Unit, read_batches
from zerolm.errors import ShardError, ZerolmError
from zerolm.files import attempt_token
from zerolm.manifest import token_dtype
from zerolm.origins import pack_origins

CHUNK_BYTES = 1 << 19  # of text, to parse and encode at a time
LONG_TOKENS = 300  # of a document, on average
PART_SECONDS = 15.0  # of work: what a killed task has to do again, at most
HELD_OUT_HASH = "blake2b-64 of the UTF-8 text"
ENCODED = "encoded"  # in the directory of the parts: a directory for each unit


class Encoder(Protocol):
    """What data_prep/encoders.py makes."""

    counts: Counter[str]

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids of all texts, (N,), and each text's end in them and UTF-8 bytes, (D,)."""


def is_held_out(utf8: bytes, fraction: float) -> bool:
    """Say whether a document belongs to the validation split.

    It is a function of the text alone: it does not depend on the other documents nor their order,
    copies of a document go the same way, and a larger fraction holds out more, not others.
    """
    digest = hashlib.blake2b(utf8, digest_size=8, person=b"zerolm-val").digest()
    return int.from_bytes(digest, "big") < fraction * (1 << 64)


@dataclass(frozen=True)
class DocumentEncoder:
    """Arranges the ids of documents as shards have them.

    Args:
        val_fraction: None where there is no validation split.
    """

    eos_id: int
    vocab_size: int
    val_fraction: float | None

    @property
    def num_splits(self) -> int:
        """One, or two with validation documents."""
        return 1 if self.val_fraction is None else 2

    def encode(self, encoder: Encoder, documents: Sequence[Any]) -> tuple[list[parts.Batch], int]:
        """Encode documents (with `text`, `input` and `start`).

        Returns:
            A batch for each split, and the number of EOS ids that a document's own text gave.

        Raises:
            ShardError: an id outside of the vocabulary.
        """
        texts = [document.text for document in documents]
        ids, ends, text_bytes = encoder.encode(texts)
        lengths = ends.copy()
        lengths[1:] -= ends[:-1]
        held_out = np.zeros(len(texts), bool)
        if self.val_fraction is not None:
            held_out[:] = [is_held_out(text.encode(), self.val_fraction) for text in texts]
        if len(ids):
            self._check_range(ids)
        tokens = self._with_eos(ids, ends[lengths > 0])
        num_inner_eos = int(np.count_nonzero(tokens == self.eos_id)) - int((lengths > 0).sum())
        origins = pack_origins(
            np.array([document.input for document in documents], np.uint64),
            np.array([document.start for document in documents], np.uint64),
        )
        lengths = np.where(lengths > 0, lengths + 1, 0)
        if not held_out.any():
            chosen: list[Any] = [slice(None)]
        else:
            chosen = [~held_out, held_out]
        batches = []
        for which in chosen:
            own = tokens if len(chosen) == 1 else tokens[np.repeat(which, lengths)]
            there = lengths[which] > 0  # else a tokenizer that drops spaces, and only spaces
            batches.append(
                parts.Batch(
                    own,
                    lengths[which][there],
                    origins[which][there],
                    int(text_bytes[which][there].sum()),
                )
            )
        return batches, num_inner_eos

    def _check_range(self, ids: np.ndarray) -> None:
        largest = int(ids.max())
        smallest = 0 if ids.dtype.kind == "u" else int(ids.min())
        if largest >= self.vocab_size or smallest < 0:
            raise ShardError(
                f"token id {largest if smallest >= 0 else smallest} is outside of the vocabulary "
                f"of {self.vocab_size}: the tokenizer does not match its declared size. Correct "
                f"the tokenizer."
            )

    def _with_eos(self, ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Put the EOS id behind each document; none of them is empty."""
        tokens = np.empty(len(ids) + len(ends), token_dtype(self.vocab_size))
        if len(ids) > LONG_TOKENS * len(ends):  # a copy for each is less than a mask over all
            start = 0
            for number, end in enumerate(ends.tolist()):
                tokens[start + number : end + number] = ids[start:end]
                start = end
            tokens[ends + np.arange(len(ends))] = self.eos_id
            return tokens
        places = ends + np.arange(len(ends))
        is_text = np.ones(len(tokens), bool)
        is_text[places] = False
        tokens[is_text] = ids
        tokens[places] = self.eos_id
        return tokens


@dataclass(frozen=True)
class EncodeUnits:
    """Task i encodes unit i; its record names the parts, and says what was not encoded and why.

    Args:
        directory: of the parts.
        units: with the fingerprint of what each one's parts are made of, since parts of something
            else are removed.
        open_encoder: called once in each process.
        running: directory where a task notes how far it is.
        part_seconds: of work in a part.
    """

    directory: Path
    inputs: tuple[Input, ...]
    units: tuple[tuple[Unit, str], ...]
    rules: InputRules
    open_encoder: Callable[[], Encoder]
    documents: DocumentEncoder
    running: Path
    part_seconds: float

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of this process, and of those that are copies of it."""
        return self.open_encoder()

    def load(self) -> None:
        """Make the encoder now."""
        assert self.encoder

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __call__(self, task: int) -> dict[str, Any]:
        """Encode what is left of a unit.

        Raises:
            ConfigError: documents that cannot be read, or ids outside of the vocabulary.
            ZerolmError: the encoder contradicts its reference.
            OSError: the parts cannot be written.
        """
        unit, fingerprint = self.units[task]
        name = f"{ENCODED}/{task:05d}"
        directory = self.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        done = parts.read_parts(directory, fingerprint)
        progress = TaskProgress(self.running / f"{task:05d}.running", unit.size_bytes)
        for part in done:
            progress.add(part["input_bytes"], *parts.counts_of(part))
        if not (done and done[-1]["last"]):
            _UnitEncoder(self, directory, fingerprint, done, progress).encode(unit)
        return _unit_record(name, done)


class _UnitEncoder:
    """One go at a unit: appends the records of the parts that it writes to `done`."""

    def __init__(
        self,
        job: EncodeUnits,
        directory: Path,
        fingerprint: str,
        done: list[dict[str, Any]],
        progress: TaskProgress,
    ):
        self.job, self.directory, self.fingerprint = job, directory, fingerprint
        self.done, self.progress = done, progress
        self.tally = Tally.from_records([part["tally"] for part in done[-1:]])
        self.position = Position(*done[-1]["position"]) if done else None
        self.writer = attempt_token()
        self._open_part()

    def encode(self, unit: Unit) -> None:
        batches = read_batches(
            self.job.inputs, unit, self.job.rules, self.tally, CHUNK_BYTES, self.position
        )
        try:
            for batch in batches:
                tokens = self._add(batch.documents) if batch.documents else 0
                self.counts["input_bytes"] += batch.input_bytes
                self.position = batch.next
                self.progress.add(batch.input_bytes, len(batch.documents), tokens)
                if time.monotonic() >= self.due or self.part.is_full:
                    self._close_part(last=False)
                    self._open_part()
            self._close_part(last=True)
        finally:
            self.part.abort()

    def _open_part(self) -> None:
        name = parts.part_name(len(self.done), self.writer)
        self.part = parts.PartWriter(self.directory, name, self.job.documents.num_splits)
        self.counts = dict.fromkeys(("input_bytes", "no_tokens", "inner_eos_ids"), 0)
        self.encoded_before = Counter(self.job.encoder.counts)
        self.due = time.monotonic() + self.job.part_seconds

    def _add(self, documents: Sequence[Document]) -> int:
        try:
            batches, num_inner_eos = self.job.documents.encode(self.job.encoder, documents)
        except ZerolmError as error:
            number = getattr(error, "document", None)
            if number is None:
                raise
            document = documents[number]
            name = self.job.inputs[document.input].name
            raise ZerolmError(f"{name} (at {document.start:,}): {error}") from error
        num_tokens = num_documents = 0
        for split, batch in enumerate(batches):
            self.part.add(split, batch)
            num_tokens += len(batch.token_ids)
            num_documents += len(batch.lengths)
        self.counts["no_tokens"] += len(documents) - num_documents
        self.counts["inner_eos_ids"] += num_inner_eos
        return num_tokens

    def _close_part(self, last: bool) -> None:
        self.done.append(
            self.part.close(
                self.done[-1]["name"] if self.done else None,
                fingerprint=self.fingerprint,
                position=self.position,
                last=last,
                tally=self.tally.record(),
                encoded=dict(self.job.encoder.counts - self.encoded_before),
                **self.counts,
            )
        )


def _unit_record(name: str, done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what is to be known of an encoded unit: sums over its parts, and their files."""
    splits: list[dict[str, int]] = []
    for entries in zip(*(part["splits"] for part in done), strict=True):
        keys = ("num_documents", "num_tokens", "text_bytes")
        splits.append({key: sum(entry[key] for entry in entries) for key in keys})
    encoded: Counter[str] = Counter()
    for part in done:
        encoded.update(part["encoded"])
    no_tokens = sum(part["no_tokens"] for part in done)
    tally = done[-1]["tally"]
    skipped = Counter(tally["skipped"]) + Counter({"no_tokens": no_tokens})
    return {
        "files": {
            f"{name}/{file}": size for part in done for file, size, _ in parts.files_of(part)
        },
        "parts": [
            [
                [f"{name}/{part['name']}.{split}", entry["num_documents"], entry["num_tokens"]]
                for part in done
                if (entry := part["splits"][split])["num_documents"]
            ]
            for split in range(len(splits))
        ],
        "checksums": [checksum for part in done for _, _, checksum in parts.files_of(part)],
        "splits": splits,
        "tally": tally,
        "skipped": dict(skipped),
        "encoded": dict(encoded),
        "inner_eos_ids": sum(part["inner_eos_ids"] for part in done),
        "documents_in": tally["documents_in"],
        "documents_out": sum(split["num_documents"] for split in splits),
        "dropped": dict(skipped + Counter(tally["bad"])),
    }
