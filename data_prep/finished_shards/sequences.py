"""Shows training data as text, either a window of a source or a document.

This module locates the window or document; `zerolm.data.window_text` reads, decodes and formats the
tokens. Independent of the command line.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from zerolm.common.errors import ConfigError
from zerolm.config.settings import BEST_FIT
from zerolm.data.packing import num_rows, open_intact_packing
from zerolm.data.window_text import (
    DocumentSpan,
    read_document,
    read_row,
    read_window,
    render_window,
    source_decoder,
)
from zerolm.shards.origins import find_origin
from zerolm.shards.reader import Source


class Excerpt(NamedTuple):
    """Consecutive tokens of one source.

    Attributes:
        labels: keys and values that identify the tokens: `window` and `tokens`, or `document`.
        parts: the tokens, divided into one part per document.
    """

    source: Source
    labels: dict[str, Any]
    parts: list[DocumentSpan]


def window_excerpt(source: Source, window: int, seq_len: int, packing: str) -> Excerpt:
    """Return a window of a source; with best-fit packing, this is a row of the packing index."""
    count = num_rows(source, seq_len, packing)
    if count == 0:
        raise ConfigError(
            f"{source.directory}: {source.num_tokens} tokens are too few for a window of --seq_len "
            f"{seq_len}, which needs {seq_len + 1}. Choose a smaller --seq_len."
        )
    if window >= count:
        raise ConfigError(
            f"--sequence {window}: {source.directory} has {count:,} windows of --seq_len "
            f"{seq_len}, numbered from 0. Choose a smaller one."
        )
    if packing == BEST_FIT:
        parts = read_row(source, open_intact_packing(source, seq_len), window)
        return Excerpt(source, {"window": window}, parts)
    start = window * seq_len
    labels = {"window": window, "tokens": [start, start + seq_len + 1]}
    return Excerpt(source, labels, read_window(source, window, seq_len))


def document_excerpt(source: Source, document: int) -> Excerpt:
    """Return an entire document of a source, given its index, which starts at 0."""
    if document >= source.num_documents:
        raise ConfigError(
            f"--document {document}: {source.directory} has {source.num_documents:,} documents, "
            f"numbered from 0. Choose a smaller one."
        )
    return Excerpt(source, {"document": document}, [read_document(source, document)])


def text_lines(excerpt: Excerpt) -> Iterator[str]:
    """Format an excerpt as text, and yield the lines."""
    source, labels, parts = excerpt
    title = f"document {parts[0].document}"
    if "window" in labels:
        title = f"window {labels['window']}"
        if "tokens" in labels:
            title += ", tokens {:,} to {:,}".format(*labels["tokens"])
        title += f", documents {parts[0].document} to {parts[-1].document}"
    yield f"{source.directory}: {title} of {source.num_documents:,}"
    yield from render_window(source, parts, source_decoder(source))


def json_line(excerpt: Excerpt) -> str:
    """Return an excerpt as a JSON object."""
    source, labels, parts = excerpt
    decode, documents = source_decoder(source), []
    for part in parts:
        found = find_origin(source, part.document)
        documents.append(
            {
                "document": part.document,
                "start": part.start,
                "stop": part.stop,
                "num_tokens": part.length,
                "origin": None if found is None else found._asdict(),
                "text": decode(part.token_ids.tolist()),
            }
        )
    return json.dumps({"shards": str(source.directory), **labels, "documents": documents})
