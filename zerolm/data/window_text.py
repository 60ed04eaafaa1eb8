"""Windows of token shards as text, document by document, for people who look at data.

Decodes with the tokenizer's copy that lies beside the shards. Knows nothing of runs; which window a
sequence is, is the business of zerolm/order.py.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerolm.errors import ConfigError
from zerolm.packing import Packing
from zerolm.shards import Source
from zerolm.tokenizer_copy import TIKTOKEN_FILE, auto_tokenizer, read_encoding

Decoder = Callable[[Sequence[int]], str]


class Part(NamedTuple):
    """The tokens of a window that belong to one document."""

    document: int  # number in the source, from 0
    start: int  # first token shown, counted inside the document
    stop: int
    length: int  # of the document, its EOS included
    token_ids: np.ndarray


def read_window(source: Source, window: int, seq_len: int) -> list[Part]:
    """Return the `seq_len` + 1 tokens of a window, document by document."""
    return _read_parts(source, window * seq_len, (window + 1) * seq_len + 1)


def read_document(source: Source, document: int) -> Part:
    """Return all tokens of a document of a source."""
    number = document
    for shard, entry in enumerate(source.manifest["shards"]):
        if number < entry["num_documents"]:
            ends = source.document_ends(shard).astype(np.int64)
            start, end = int(ends[number - 1]) if number else 0, int(ends[number])
            return Part(document, 0, end - start, end - start, source.ids(shard, start, end))
        number -= entry["num_documents"]
    raise IndexError(f"document {document} of {source.num_documents}")


def read_row(source: Source, packing: Packing, row: int) -> list[Part]:
    """Return the tokens of a packed row, document by document, without what fills it up."""
    starts, lengths = packing.pieces(row)
    return [
        part
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        for part in _read_parts(source, start, start + length)
    ]


def _read_parts(source: Source, start: int, stop: int) -> list[Part]:
    first = int(np.searchsorted(source.starts, start, side="right")) - 1
    end = int(np.searchsorted(source.starts[:-1], stop, side="left"))
    return [
        part
        for number in range(first, end)
        for part in _parts_in_shard(source, number, start, stop)
    ]


def _parts_in_shard(source: Source, number: int, start: int, stop: int) -> Iterator[Part]:
    base = int(source.starts[number])
    start, stop = max(start - base, 0), min(stop, int(source.starts[number + 1])) - base
    if start >= stop:
        return
    before = sum(shard["num_documents"] for shard in source.manifest["shards"][:number])
    ends = source.document_ends(number).astype(np.int64)
    document = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        first = int(ends[document - 1]) if document else 0
        end = int(ends[document])
        upto = min(end, stop)
        yield Part(
            before + document,
            start - first,
            upto - first,
            end - first,
            source.ids(number, start, upto),
        )
        start, document = upto, document + 1


def render(parts: Sequence[Part], decode: Decoder) -> Iterator[str]:
    """Yield the lines that show a window."""
    for part in parts:
        whole = part.start == 0 and part.stop == part.length
        which = "whole" if whole else f"tokens {part.start:,} to {part.stop:,} of {part.length:,}"
        yield f"--- document {part.document} ({which}) ---"
        yield decode(part.token_ids.tolist())


def decoder_of(source: Source) -> Decoder:
    """Return what makes text of a source's ids: the tokenizer's copy beside its shards.

    Raises:
        ConfigError: there is none, or none that can be loaded.
    """
    copy = source.tokenizer_directory()
    if not copy.is_dir():
        raise ConfigError(
            f"{copy}: no such directory, so ids cannot be shown as text. Put the tokenizer there "
            f"that made the shards."
        )
    return load_decoder(copy)


def load_decoder(directory: Path) -> Decoder:
    """Return a function from ids to text, made from a tokenizer's copy; special tokens are shown.

    Raises:
        ConfigError: there is no tokenizer that can be loaded.
    """
    if (directory / TIKTOKEN_FILE).is_file():
        return read_encoding(directory).decode
    if (directory / "tokenizer.json").is_file():
        import tokenizers

        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        return lambda ids: backend.decode(ids, skip_special_tokens=False)
    tokenizer = auto_tokenizer(str(directory), local=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
