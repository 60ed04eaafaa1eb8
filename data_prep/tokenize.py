"""Documents to token shards: worker processes encode, this process orders and writes.

`data_prep/__main__.py` hands over what the siblings of this module make: chunks of documents and a
tokenizer. The bytes of the shards depend on the documents, the tokenizer and the size of a shard
only: neither on the number of workers nor on how the input was cut into batches.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from data_prep.documents import Chunk, InputRules, read_documents
from data_prep.progress import Progress
from data_prep.readers import Input
from data_prep.units import MAX_PROBLEMS, describe
from data_prep.workers import ordered_map
from zerolm.errors import ConfigError, ZerolmError
from zerolm.shards import ShardWriter, token_dtype

# Of text, for a worker at a time. Large enough that sending costs nothing, small enough that the
# last batch of a corpus does not keep one worker busy for long while the others have finished.
BATCH_BYTES = 1 << 18
HELD_OUT_HASH = "blake2b-64 of the UTF-8 text"

Encoder = Callable[[Sequence[str]], Sequence[Sequence[int]]]


class Split(NamedTuple):
    """The documents of a batch that go to one output."""

    token_ids: np.ndarray  # (N,) of the shards' dtype, each document ending in the EOS id
    document_ends: np.ndarray  # (D,) int64
    text_bytes: int


class Encoded(NamedTuple):
    """What a worker returns for a batch."""

    splits: list[Split]  # training, and validation if there is one
    skipped: Counter[str]
    num_inner_eos: int  # EOS ids that a document's own text gave
    input_bytes: int


@dataclass(frozen=True)
class BatchEncoder:
    """What workers do with a batch; calling it returns the function, inside of a worker."""

    load_encoder: Callable[[], Encoder]
    eos_id: int
    vocab_size: int
    inputs: Sequence[Input]
    rules: InputRules
    val_fraction: float | None

    def __call__(self) -> Callable[[Sequence[Chunk]], Encoded]:
        encode = self.load_encoder()
        return lambda chunks: self.encode(encode, chunks)

    def encode(self, encode: Encoder, chunks: Sequence[Chunk]) -> Encoded:
        """Encode the documents of some chunks.

        Raises:
            ConfigError: documents that cannot be read.
        """
        documents, skipped = [], Counter[str]()
        for chunk in chunks:
            found, harmless, problems = read_documents(chunk, self.rules)
            if problems:
                raise ConfigError(describe(self.inputs, problems[:MAX_PROBLEMS], self.rules))
            documents += found
            skipped += harmless
        dtype = token_dtype(self.vocab_size)
        eos = np.array([self.eos_id], dtype)
        parts: list[list[np.ndarray]] = [[], []]
        text_bytes = [0, 0]
        all_ids = encode([document.text for document in documents]) if documents else []
        for document, ids in zip(documents, all_ids, strict=True):
            if not ids:  # a tokenizer that drops spaces, and a document of spaces
                skipped["no_tokens"] += 1
                continue
            side = int(
                self.val_fraction is not None and is_held_out(document.utf8, self.val_fraction)
            )
            parts[side] += [np.array(ids, np.int64).astype(dtype), eos]
            text_bytes[side] += len(document.utf8)
        splits = []
        num_inner_eos = 0
        for pieces, size in zip(parts, text_bytes, strict=True):
            token_ids = np.concatenate(pieces) if pieces else np.empty(0, dtype)
            ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)[1::2]
            num_inner_eos += int((token_ids == self.eos_id).sum()) - len(ends)
            splits.append(Split(token_ids, ends, size))
        if self.val_fraction is None:
            del splits[1:]
        return Encoded(splits, skipped, num_inner_eos, sum(chunk.input_bytes for chunk in chunks))


def is_held_out(utf8: bytes, fraction: float) -> bool:
    """Say whether a document belongs to the validation split.

    It is a function of the text alone: it does not depend on the other documents nor their order,
    copies of a document go the same way, and a larger fraction holds out more, not others.
    """
    digest = hashlib.blake2b(utf8, digest_size=8, person=b"zerolm-val").digest()
    return int.from_bytes(digest, "big") < fraction * (1 << 64)


def batches(chunks: Iterable[Chunk], batch_bytes: int) -> Iterator[list[Chunk]]:
    """Group chunks, in their order, to about `batch_bytes` of text."""
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        if isinstance(chunk.data, bytes):
            size += len(chunk.data)
        else:
            size += sum(len(text) for text in chunk.data if isinstance(text, str))
        size += 64  # of overhead: a million empty files are not one batch
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass
class Summary:
    """What was done."""

    manifests: list[dict[str, Any]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    text_bytes: list[int] = field(default_factory=list)
    num_inner_eos: int = 0
    seconds: float = 0.0


def tokenize(
    chunks: Iterable[Chunk],
    writers: Sequence[ShardWriter],
    encoder: BatchEncoder,
    *,
    num_workers: int,
    progress: Progress,
    provenance: dict[str, Any],
) -> Summary:
    """Encode all chunks, write them, and publish the manifests of all writers.

    Args:
        writers: of the training documents, and of those held out if there is a `val_fraction`.
            Unless everything goes well, nothing that they wrote is left.
        provenance: further keys of the manifests.

    Raises:
        ConfigError: a document or file that cannot be read, or an output without documents.
        ZerolmError: a worker died, or only a part of the outputs could be published.
    """
    summary = Summary(text_bytes=[0] * len(writers))
    with ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.abort)
        results = ordered_map(encoder, batches(chunks, BATCH_BYTES), num_workers)
        for encoded in stack.enter_context(closing(results)):
            _write(encoded, writers, summary)
            progress.add(
                encoded.input_bytes,
                sum(len(split.document_ends) for split in encoded.splits),
                sum(len(split.token_ids) for split in encoded.splits),
            )
        _publish(writers, encoder, summary, provenance)
    summary.seconds = progress.seconds
    return summary


def _write(encoded: Encoded, writers: Sequence[ShardWriter], summary: Summary) -> None:
    for number, (writer, split) in enumerate(zip(writers, encoded.splits, strict=True)):
        if len(split.document_ends):
            with _saying_where(writer):
                writer.add(split.token_ids, split.document_ends)
            summary.text_bytes[number] += split.text_bytes
    summary.skipped += encoded.skipped
    summary.num_inner_eos += encoded.num_inner_eos


@contextmanager
def _saying_where(writer: ShardWriter) -> Iterator[None]:
    """Name the output that a full disk, or a lost one, is under."""
    try:
        yield
    except OSError as error:
        raise ZerolmError(
            f"{writer.directory}: cannot be written ({error}). Nothing was published."
        ) from error


def _publish(
    writers: Sequence[ShardWriter],
    encoder: BatchEncoder,
    summary: Summary,
    provenance: dict[str, Any],
) -> None:
    empty = [writer for writer in writers if writer.num_documents == 0]
    if empty:
        skipped = sum(summary.skipped.values())
        raise ConfigError(
            f"{writer.directory}: would have no documents, of "
            f"{sum(each.num_documents for each in writers)} read and {skipped} skipped. "
            + ("Check --input." if len(empty) == len(writers) else "Check --val_fraction.")
            for writer in empty
        )
    for writer in writers:  # what can fail fails here, before anything is published
        with _saying_where(writer):
            writer.finish_shard()
    for number, writer in enumerate(writers):
        keys = {
            "text_bytes": summary.text_bytes[number],
            "skipped_documents": dict(sorted(summary.skipped.items())),
            "inner_eos_ids": summary.num_inner_eos,
            **provenance,
        }
        if encoder.val_fraction is not None:
            keys["split"] = {
                "part": ("training", "validation")[number],
                "val_fraction": encoder.val_fraction,
                "hash": HELD_OUT_HASH,
            }
        try:
            summary.manifests.append(writer.close(**keys))
        except OSError as error:
            done = [str(each.directory) for each in writers if each.published]
            left = [str(each.directory) for each in writers if not each.published]
            raise ZerolmError(
                f"{writer.directory}: the manifest cannot be written ({error}). Published: "
                f"{', '.join(done) or 'nothing'}; not published and removed: {', '.join(left)}. "
                f"Remove what was published before you start again."
            ) from error
