"""Windows of token shards as text, split by document, for inspection by people.

Decodes with the tokenizer copy next to the shards. Independent of runs; `Order` maps sequences to
windows.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerolm.common.errors import ConfigError
from zerolm.data.packing import Packing
from zerolm.shards.origins import find_origin
from zerolm.shards.reader import Source
from zerolm.shards.table import column
from zerolm.shards.tokenizer import TIKTOKEN_FILE, load_auto_tokenizer, load_backend, read_tiktoken

Decoder = Callable[[Sequence[int]], str]


class DocumentSpan(NamedTuple):
    """The tokens of a window that belong to one document.

    Attributes:
        document: index of the document in the source.
        start: index of the span's first token in the document.
        stop: index after the span's last token in the document.
        length: number of tokens in the document, including its EOS.
    """

    document: int
    start: int
    stop: int
    length: int
    token_ids: np.ndarray


def read_window(source: Source, window: int, seq_len: int) -> list[DocumentSpan]:
    """Return the `seq_len` + 1 tokens of a window as one span per document."""
    return _read_spans(source, window * seq_len, (window + 1) * seq_len + 1)


def read_document(source: Source, document: int) -> DocumentSpan:
    """Return all tokens of one of a source's documents."""
    number = document
    for shard, entry in enumerate(source.shards):
        if number < entry["num_documents"]:
            ends = source.document_ends(shard).astype(np.int64)
            start, end = int(ends[number - 1]) if number else 0, int(ends[number])
            ids = source.ids(shard, start, end)
            return DocumentSpan(document, 0, end - start, end - start, ids)
        number -= entry["num_documents"]
    raise IndexError(f"document {document} of {source.num_documents}")


def read_row(source: Source, packing: Packing, row: int) -> list[DocumentSpan]:
    """Return the tokens of a packed row as one span per document, without padding."""
    starts, lengths = packing.pieces(row)
    return [
        span
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        for span in _read_spans(source, start, start + length)
    ]


def _read_spans(source: Source, start: int, stop: int) -> list[DocumentSpan]:
    first = int(np.searchsorted(source.starts, start, side="right")) - 1
    end = int(np.searchsorted(source.starts[:-1], stop, side="left"))
    return [
        span
        for number in range(first, end)
        for span in _spans_in_shard(source, number, start, stop)
    ]


def _spans_in_shard(source: Source, number: int, start: int, stop: int) -> Iterator[DocumentSpan]:
    base = int(source.starts[number])
    start, stop = max(start - base, 0), min(stop, int(source.starts[number + 1])) - base
    if start >= stop:
        return
    before = int(column(source.shards, "num_documents")[:number].sum())
    ends = source.document_ends(number).astype(np.int64)
    document = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        first = int(ends[document - 1]) if document else 0
        end = int(ends[document])
        upto = min(end, stop)
        ids = source.ids(number, start, upto)
        yield DocumentSpan(before + document, start - first, upto - first, end - first, ids)
        start, document = upto, document + 1


def render_window(source: Source, spans: Sequence[DocumentSpan], decode: Decoder) -> Iterator[str]:
    """Yield lines that show the extent, origin and text of each document in a window."""
    for span in spans:
        extent = f"tokens {span.start:,} to {span.stop:,} of {span.length:,}"
        if span.start == 0 and span.stop == span.length:
            extent = f"complete, {span.length:,} tokens"
        found = find_origin(source, span.document)
        where = f", {found.file}, {found.unit} {found.position}" if found else ""
        yield f"--- document {span.document} ({extent}{where}) ---"
        yield decode(span.token_ids.tolist())


def source_decoder(source: Source) -> Decoder:
    """Return a function that decodes a source's ids, using the tokenizer next to its shards.

    Raises:
        ConfigError: there is no tokenizer, or it cannot be loaded.
    """
    copy = source.tokenizer_directory()
    if not copy.is_dir():
        raise ConfigError(
            f"{copy}: no such directory, so ids cannot be shown as text. Copy the tokenizer of the "
            "shards to it."
        )
    return load_decoder(copy)


def load_decoder(directory: Path) -> Decoder:
    """Load a tokenizer and return its function from ids to text, which includes special tokens."""
    if (directory / TIKTOKEN_FILE).is_file():
        return read_tiktoken(directory).decode
    if (directory / "tokenizer.json").is_file():
        backend = load_backend(directory / "tokenizer.json")
        return lambda ids: backend.decode(ids, skip_special_tokens=False)
    tokenizer = load_auto_tokenizer(str(directory), local=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
