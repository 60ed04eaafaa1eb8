"""Writes token shards from files in another format, without changing ids.

Before anything is published, every id is checked against the vocabulary, and every document must
end with the EOS id. Independent of the formats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.files.inputs import state_of
from data_prep.finished_shards.documents import Documents
from data_prep.finished_shards.items import InputFile, Items
from data_prep.finished_shards.output import Output, write_outputs
from data_prep.tasks.progress import Progress
from data_prep.tokenizer.load import Tokenizer
from zerolm.common.errors import ConfigError
from zerolm.common.files import sha256_file
from zerolm.shards.manifest import token_dtype
from zerolm.shards.origins import POSITION_BITS, pack_origins
from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

ITEMS, EOS, BOS = "items", "eos", "bos"
MAX_DOCUMENT_IDS = (
    1 << 28
)  # maximum number of ids per document if only EOS or BOS ids separate documents


@dataclass(frozen=True)
class Rules:
    """How items form documents.

    Attributes:
        boundaries: `items` if each item is a document; `eos` if documents end at EOS ids, `bos` if
            they begin with BOS ids, and may extend over several items and files.
        append_eos: append an EOS id to documents that do not end with one; otherwise they are
            refused.
    """

    boundaries: str = ITEMS
    append_eos: bool = False
    shard_tokens: int = DEFAULT_SHARD_TOKENS


def _state(file: InputFile) -> tuple[Any, ...]:
    status = file.path.stat()
    return file.path, status.st_size, status.st_mtime_ns, state_of(status)


class _Reader:
    """Reads documents from the input files, and counts how they differ from the files' content.

    Attributes:
        appended, dropped: numbers of EOS ids that were appended to documents, and that were dropped
            because they end an empty document.
        empty: number of documents that were left out because they contain no ids.
    """

    def __init__(self, files: Sequence[InputFile], tokenizer: Tokenizer, rules: Rules):
        self.files, self.rules = files, rules
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self.bos_id = tokenizer.bos_id
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.num_ids = self.appended = self.dropped = self.empty = 0
        self.states = {_state(file) for file in files}

    def documents(self) -> Iterator[Documents]:
        """Yield the documents of all files; a document's origin is the file and position where it
        begins.
        """
        by_items = self.rules.boundaries == ITEMS and all(file.has_ends for file in self.files)
        for ids, ends, origins in self._by_item() if by_items else self._by_id():
            lengths = np.diff(ends, prepend=0)
            kept = np.flatnonzero(lengths)
            self.empty += len(ends) - len(kept)
            if len(kept):
                ids, ends = self._with_eos(ids, ends[kept], origins[kept])
                yield Documents(ids, ends, origins[kept])

    def _by_item(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for number, file in enumerate(self.files):
            first = 0
            for ids, ends in self._pieces(file):
                yield ids, ends, pack_origins(number, np.arange(first, first + len(ends)))
                first += len(ends)

    def _pieces(self, file: InputFile) -> Iterator[Items]:
        """Yield a file's items with ids in the shards' dtype; refuse ids outside the vocabulary."""
        start = 0
        for ids, ends in file.read():
            low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
            if low < 0 or high >= self.vocab_size:
                place = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
                raise ConfigError(
                    f"{file.path}: id {ids[place]} at position {start + place} is outside the "
                    f"tokenizer's vocabulary of {self.vocab_size} ids. Give the --tokenizer (and "
                    "--dtype) that the file was written with."
                )
            start += len(ids)
            self.num_ids += len(ids)
            yield Items(ids.astype(self.dtype, copy=False), ends)
        if _state(file) not in self.states:
            raise ConfigError(
                f"{file.path}: was written to or replaced since the command started. Run the "
                f"command again when no process writes to the input."
            )

    def _with_eos(self, ids: np.ndarray, ends: np.ndarray, origins: np.ndarray) -> Items:
        """Append the EOS id to documents that do not end with it, or refuse such documents."""
        missing = np.flatnonzero(ids[ends - 1] != self.eos_id)
        if not len(missing):
            return Items(ids, ends)
        if not self.rules.append_eos:
            number, place = divmod(int(origins[missing[0]]), 1 << POSITION_BITS)
            file = self.files[number]
            raise ConfigError(
                f"{file.path}: {file.unit} {place} ends with id {ids[ends[missing[0]] - 1]}, not "
                f"with the tokenizer's EOS id {self.eos_id}. Give the --tokenizer that the file "
                "was written with. If the file's documents have no EOS, use --append_eos; if "
                "they extend over several items, use --boundaries eos."
            )
        self.appended += len(missing)
        ids = np.insert(ids, ends[missing], self.eos_id)
        added = np.zeros(len(ends), np.int64)
        added[missing] = 1
        return Items(ids, ends + np.cumsum(added))

    def _by_id(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield documents, split after EOS ids or before BOS ids; a document may extend over
        several items and files.

        If a file begins with an EOS id, its documents have their EOS ids at the start, not at the
        end.
        """
        by_bos = self.rules.boundaries == BOS
        left: list[np.ndarray] = []  # ids of an incomplete document
        num_left, begun = 0, 0  # its length and origin
        for number, file in enumerate(self.files):
            first, is_start = 0, True  # number of documents that have begun in this file
            for ids, _ in self._pieces(file):
                ends = np.flatnonzero(ids == self.eos_id) + 1
                if by_bos:
                    ends = np.flatnonzero(ids == self.bos_id)
                    ends = ends[ends + num_left > 0]
                elif is_start and not num_left and len(ends) and ends[0] == 1:
                    self.empty += 1
                    self.dropped += 1
                    ids, ends = ids[1:], ends[1:] - 1
                is_start = False
                if not num_left:
                    begun = int(pack_origins(number, np.array([first]))[0])
                    first += 1
                stop = int(ends[-1]) if len(ends) else 0
                if len(ends):
                    more = pack_origins(number, np.arange(first, first + len(ends) - 1))
                    origins = np.concatenate([np.array([begun], np.uint64), more])
                    yield np.concatenate([*left, ids[:stop]]), ends + num_left, origins
                    first += len(ends) - 1
                    left, num_left = [], 0
                    begun = int(pack_origins(number, np.array([first]))[0])
                    first += stop < len(ids)
                left.append(ids[stop:].copy())
                num_left += len(ids) - stop
                if num_left > MAX_DOCUMENT_IDS:
                    raise ConfigError(
                        f"{file.path}: the tokenizer's {'BOS' if by_bos else 'EOS'} id "
                        f"{self.bos_id if by_bos else self.eos_id} is not among "
                        f"{num_left:,} consecutive ids. Give the --tokenizer (and --dtype) that "
                        "the file was written with."
                    )
        if num_left:  # ids that are not followed by an EOS id
            last = np.concatenate(left)
            if not by_bos and self.bos_id is not None and (last == self.bos_id).sum() > 1:
                raise ConfigError(
                    f"{self.files[-1].path}: {num_left:,} ids without the tokenizer's EOS id "
                    f"contain its BOS id {self.bos_id} several times, which begins documents. Use "
                    "--boundaries bos --append_eos."
                )
            yield last, np.array([num_left]), np.array([begun], np.uint64)


def convert(
    files: Sequence[InputFile],
    arguments: Sequence[str],
    tokenizer: Tokenizer,
    output: Path,
    rules: Rules,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """Write all documents in the files to shards, and return the shards' manifest.

    Args:
        arguments: the inputs as the user gave them, for the manifest.
    """
    reader = _Reader(files, tokenizer, rules)
    total = sum(file.size_bytes for file in files)
    entries = [
        {"name": str(file.path), "size_bytes": file.size_bytes, "unit": file.unit} for file in files
    ]
    progress = Progress("convert", total)

    def start() -> Output:
        return Output(
            output,
            tokenizer.vocab_size,
            tokenizer.eos_id,
            tokenizer.write_copy,
            rules.shard_tokens,
            tokenizer.bos_id,
        )

    def write(outputs: Sequence[Output]) -> None:
        for documents in reader.documents():
            outputs[0].add(documents)
            progress.add(documents.ids.nbytes, len(documents.ends), len(documents.ids))
        written = outputs[0].writer.num_tokens
        assert written == reader.num_ids + reader.appended - reader.dropped, "ids were lost"
        for entry, file in zip(entries, files, strict=True):
            entry["sha256"] = sha256_file(file.path)

    def keys(number: int, written: Output) -> dict[str, Any]:
        return {
            **written.counted(),
            "skipped_documents": {"empty": reader.empty} if reader.empty else {},
            "inputs": [{"input": each} for each in arguments],
            "convert": {
                "boundaries": rules.boundaries,
                "read_ids": reader.num_ids,
                "appended_eos": reader.appended,
                "dropped_eos": reader.dropped,
            },
            **provenance,
        }

    try:
        return write_outputs([start], write, entries, keys)[0]
    finally:
        progress.close()
