"""Reads a text file as one document."""

from collections.abc import Iterator

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import END, Input, InputRange, problem_chunk, stream_of
from data_prep.files.parse import parse_text, too_long_problem
from data_prep.files.streams import COMPRESSIONS
from data_prep.formats.format import Format


def read_file(source: Input, part: InputRange, rules: InputRules) -> Chunk:
    """Return a whole file as a chunk of kind "text", or a problem."""
    size, limit = source.size_bytes or 0, rules.max_document_bytes
    stream = stream_of(source, 0, rules)
    is_too_long = not source.suffix.endswith(COMPRESSIONS) and size > limit
    blocks, text_bytes = [], size if is_too_long else 0
    for block in stream if not is_too_long else ():
        text_bytes += len(block)
        if text_bytes <= limit:
            blocks.append(block)
    if stream.failure is not None:
        return problem_chunk(source, part, 0, stream.failure, 1, size)
    chunk = Chunk(source.name, "text", 0, b"".join(blocks), size, part.input)
    chunk = chunk._replace(keys=source.keys, encoding=stream.encoding)
    if text_bytes > limit:
        return chunk._replace(kind="bad", data=too_long_problem(chunk, 0, text_bytes, limit))
    return chunk


def _read(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    yield read_file(source, part, rules), END


TEXT = Format(
    (".txt", ".md"),
    _read,
    parse_text,
    compressions=COMPRESSIONS,
    help="a .txt or .md file (one document)",
)
