"""What each format of input does at its edges: read in this process, and compared with what was
written. `python -m tests.test_tables` writes the table into docs/inputs.md.
"""

import bz2
import gzip
import io
import json
import lzma
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from warcio.warcwriter import WARCWriter

from data_prep.files.documents import InputRules
from data_prep.read.bad_input import Tally
from data_prep.read.discovery import find_inputs
from data_prep.read.work_units import plan_units, read_batches
from tests.data_prep.files.test_streams import compress_long
from zerolm.common.errors import ConfigError

LIMIT = 1000  # --max_document_bytes
Content = bytes | None  # of a file; None where a format cannot have the edge
Case = tuple[Content, list[str]]  # with the texts of the documents that were written
LOST = "not text"
SKIP = InputRules(on_bad_input="skip", max_bad_fraction=1, max_document_bytes=LIMIT)
RAW = b"\xff\xfe"  # as a value: bytes that are not UTF-8
Writer = Callable[[list[Any]], Content]


def as_text(values: list[Any]) -> Content:
    value = values[1]
    value = f"{value}\n" if value == TEXTS[1] else value
    return value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else None


def as_lines(values: list[Any]) -> Content:
    lines = [json.dumps({"text": "\0bytes" if v == RAW else v}, ensure_ascii=False) for v in values]
    return "".join(f"{line}\n" for line in lines).encode().replace(b"\\u0000bytes", RAW)


def as_csv(values: list[Any]) -> Content:
    if not all(isinstance(value, str | bytes) for value in values):
        return None
    texts = [value if isinstance(value, bytes) else f'"{value}"'.encode() for value in values]
    return b"n,text\n" + b"".join(b"%d,%b\n" % each for each in enumerate(texts))


def as_table(values: list[Any]) -> pa.Table | None:
    if any(isinstance(value, int) for value in values):
        return None
    packed = [value.encode() if isinstance(value, str) else value for value in values]
    return pa.table({"text": pa.array(packed, pa.binary()).view(pa.string())})


def as_parquet(values: list[Any]) -> Content:
    return parquet_of(as_table(values))


def parquet_of(table: pa.Table | None) -> Content:
    if table is None:
        return None
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def as_arrow(values: list[Any]) -> Content:
    return arrow_of(as_table(values))


def arrow_of(table: pa.Table | None) -> Content:
    if table is None:
        return None
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def as_wet(values: list[Any]) -> Content:
    if not all(isinstance(value, str | bytes) for value in values):
        return None
    file = io.BytesIO()
    writer = WARCWriter(file, gzip=True)
    for value in values:
        payload = io.BytesIO(value if isinstance(value, bytes) else value.encode())
        writer.write_record(
            writer.create_warc_record(
                "https://a.example/", "conversion", payload=payload, warc_content_type="text/plain"
            )
        )
    return file.getvalue()


WRITERS: dict[str, Writer] = {
    ".txt": as_text,
    ".jsonl": as_lines,
    ".csv": as_csv,
    ".parquet": as_parquet,
    ".arrow": as_arrow,
    ".wet.gz": as_wet,
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
PLAIN = (".txt", ".jsonl", ".csv")
TEXTS = ["one é", "two", "three"]
LINES = as_lines(TEXTS) or b""


def values_of(edge: Any) -> Callable[[str], Case]:
    """Return a file of three documents, the second of which is the edge; `.txt` has only it."""

    def case(suffix: str) -> Case:
        values = [TEXTS[0], edge, TEXTS[2]]
        texts = [value if value and isinstance(value, str) else LOST for value in values]
        return WRITERS[suffix](values), texts[1:2] if suffix == ".txt" else texts

    return case


def bytes_of(change: Callable[[bytes], bytes], suffixes=PLAIN) -> Callable[[str], Case]:
    def case(suffix: str) -> Case:
        content = change(WRITERS[suffix](TEXTS) or b"") if suffix in suffixes else None
        text = (content or b"").decode("utf-8-sig")
        return content, [text] if suffix == ".txt" else TEXTS

    return case


def table_of(suffix: str, table: pa.Table) -> Content:
    return {".parquet": parquet_of, ".arrow": arrow_of}.get(suffix, lambda table: None)(table)


def without_text(suffix: str) -> Case:
    if suffix == ".jsonl":
        return LINES.replace(b'{"text": "two"', b'{"body": "two"'), [TEXTS[0], LOST, TEXTS[2]]
    content = b"n,body\n0,one\n" if suffix == ".csv" else None
    return content or table_of(suffix, pa.table({"body": TEXTS})), [LOST] * 3


def number(suffix: str) -> Case:
    if suffix == ".jsonl":
        return values_of(5)(suffix)
    return table_of(suffix, pa.table({"text": [1, 5, 3]})), [LOST] * 3


def column(array: pa.Array, texts: list[str]) -> Callable[[str], Case]:
    return lambda suffix: (table_of(suffix, pa.table({"text": array})), texts)


def twice(suffix: str) -> Case:
    if suffix == ".jsonl":
        return LINES.replace(b'{"text": "two"', b'{"text": "first", "text": "two"'), TEXTS
    table = pa.table([pa.array(TEXTS), pa.array(TEXTS)], names=["text", "text"])
    content = b"text,text\none,one\n" if suffix == ".csv" else None
    return content or table_of(suffix, table), [LOST] * 3


def too_long(suffix: str) -> Case:
    content, texts = values_of("x" * (LIMIT + 1))(suffix)
    return content, [LOST if len(text) > LIMIT else text for text in texts]


def cut(suffix: str) -> Case:
    return None if suffix == ".txt" else (WRITERS[suffix](TEXTS) or b"")[:-4], TEXTS


def other_content(suffix: str) -> Case:
    return None if suffix == ".txt" else b"\x89PNG\r\n\x1a\n" * 9, [LOST] * 3


def packed(change: Callable[[Callable[[bytes], bytes]], bytes], texts: list[str]) -> Any:
    return lambda suffix: (change(COMPRESS[suffix]), texts)


EDGES: dict[str, Callable[[str], Case]] = {
    "no bytes": lambda suffix: (b"", [LOST]),
    "a byte order mark": bytes_of(lambda data: b"\xef\xbb\xbf" + data),
    "CRLF": bytes_of(lambda data: data.replace(b"\n", b"\r\n")),
    "no line end at the end": bytes_of(lambda data: data.rstrip(b"\n")),
    "blank lines": bytes_of(lambda data: data.replace(b"\n", b"\n\n"), (".jsonl", ".csv")),
    "a text of no characters": values_of(""),
    "not UTF-8": values_of(RAW),
    # csv reads a NUL from Python 3.11 on
    "a NUL in the text": lambda suffix: (
        (None, []) if suffix == ".csv" else values_of("two\0")(suffix)
    ),
    "no text field or column": without_text,
    "a text that is null": values_of(None),
    "a number as text": number,
    "text as bytes in UTF-8": column(pa.array([text.encode() for text in TEXTS]), TEXTS),
    "a column of nulls only": column(pa.nulls(3), [LOST] * 3),
    "the field or column twice": twice,
    "longer than `--max_document_bytes`": too_long,
    "cut": cut,
    "another content": other_content,
}
COMPRESSED_EDGES: dict[str, Callable[[str], Case]] = {
    "no bytes": lambda suffix: (b"", [LOST]),
    "compressed nothing": packed(lambda pack: pack(b""), []),
    "several members": packed(lambda pack: pack(LINES[:5]) + pack(LINES[5:]), TEXTS),
    "zeros after the last member": packed(lambda pack: pack(LINES) + bytes(8), TEXTS),
    "a window of 256 MiB": lambda suffix: (
        compress_long(LINES) if suffix == ".zst" else None,
        TEXTS,
    ),
    "cut": packed(lambda pack: pack(LINES) + pack(LINES * 9)[:-3], TEXTS * 10),
    "another content after it": packed(lambda pack: pack(LINES) + b"more" * 9, [*TEXTS, LOST]),
    "another content": packed(lambda pack: LINES, [LOST] * 3),
}


def outcome(path: Path, content: Content, expected: list[str]) -> str:
    """Return what becomes of a file, and check that nothing is lost or changed silently."""
    if content is None:
        return ""
    path.write_bytes(content)
    inputs, _ = find_inputs([str(path)], "text", True)
    tally, texts = Tally(), []
    for unit in plan_units(inputs):
        for batch in read_batches(inputs, unit, SKIP, tally):
            texts += [document.text for document in batch.documents]
    rest = iter(expected)
    assert all(text in rest for text in texts), (path, texts, "other texts than were written")
    counted = ", ".join(f"`{reason}`" for reason in [*tally.bad, *tally.skipped])
    num_lost = len(expected) - len(texts)
    assert counted or not num_lost, (path, "lost silently")
    try:
        inputs, _ = find_inputs([str(path)], "text")
        for unit in plan_units(inputs):
            list(read_batches(inputs, unit, InputRules(max_document_bytes=LIMIT), Tally()))
        assert not tally.bad, path
    except ConfigError as error:
        assert tally.bad and str(path) in str(error), (path, error)
    if not num_lost:
        return "read" + (f"; {counted}" if counted else "")
    what = ", the rest" if texts == expected[: len(texts)] else ", that document"
    return f"{'bad' if tally.bad else 'skipped'}: {counted}{what if texts else ''}"


def rows(edges: dict[str, Callable[[str], Case]], suffixes: Iterable[str], stem: str) -> str:
    names = " | ".join(f"`{suffix}`" for suffix in suffixes)
    text = f"\n| | {names} |\n|---|{'---|' * len(names.split(' | '))}\n"
    with tempfile.TemporaryDirectory() as directory:
        for edge, make in edges.items():
            cells = [outcome(Path(directory, stem + each), *make(each)) for each in suffixes]
            text += f"| {edge} | {' | '.join(cells)} |\n"
    return text


def edge_table() -> str:
    """Return both tables as Markdown."""
    return rows(EDGES, WRITERS, "a") + rows(COMPRESSED_EDGES, COMPRESS, "a.jsonl") + "\n"
