"""Files with bad input of every kind, and what is expected of them."""

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

GOOD = b'{"text": "good"}\n'
LIMIT = 10_000  # --max_document_bytes
MANY = GOOD * 3000 + b'{"text": "last"}\n'


def table(**columns: object) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class Case(NamedTuple):
    """The content of a file, and the expected result."""

    content: bytes
    bad: dict[str, int]  # documents by reason
    texts: list[str] | int  # the good documents, or how often "good"
    message: str  # with {file} for the path
    skipped: dict[str, int] = {}  # noqa: RUF012 - never changed


def line(content: bytes, reason: str, message: str) -> Case:
    """Return a bad line between two good ones."""
    return Case(GOOD + content + b"\n" + GOOD, {reason: 1}, ["good"] * 2, "{file}:2: " + message)


BOMB = zlib.compressobj(9, zlib.DEFLATED, 31)
BOMB_GZ = BOMB.compress(GOOD + bytes(80 << 20)) + BOMB.flush()
CUT_GZ = gzip.compress(MANY, mtime=0)[:-20]
READABLE = zlib.decompressobj(31).decompress(CUT_GZ)
SURROGATE = pa.array([b"a", b"\xed\xa0\x80"]).view(pa.string())
CASES = {
    "broken_json.jsonl": line(b'{"text": "a"', "bad_json", "not valid JSON"),
    "nul_bytes.jsonl": line(bytes(9), "bad_json", "not valid JSON"),
    "deep.jsonl": line(b"[" * 9000, "bad_json", "not valid JSON"),
    "old_mac.jsonl": Case(b'{"text": "a"}\r' * 2, {"bad_json": 1}, [], "{file}:1: not valid JSON"),
    "list.jsonl": line(b'["a"]', "not_an_object", "a JSON list, not an object"),
    "other_field.jsonl": line(b'{"body": "a"}', "no_text_field", "no key 'text'; it has 'body'"),
    "number.jsonl": line(b'{"text": 5}', "not_a_string", "the text is 5, of type int, not a"),
    "object.jsonl": line(
        b'{"text": {"a": "b"}}', "not_a_string", "the text is {'a': 'b'}, of type dict"
    ),
    "latin.jsonl": line(b'{"text": "caf\xe9"}', "not_utf8", "not UTF-8: byte 0xe9"),
    "surrogate.jsonl": line(rb'{"text": "a\ud800"}', "lone_surrogate", "the text has a lone"),
    "utf16.jsonl": Case(
        '{"text": "a"}'.encode("utf-16"), {"not_utf8": 1}, [], "{file}:1: not UTF-8: it is UTF-16"
    ),
    "long.jsonl": line(b'{"text": "%s"}' % (b"x" * LIMIT), "too_long", "10,012 bytes are more"),
    "long.jsonl.gz": Case(
        gzip.compress(GOOD + b'{"text": "%s"}\n' % (b"x" * 500_000) + GOOD),
        {"too_long": 1}, ["good"] * 2, "{file}:2: 500,013 bytes are more than --max_document_bytes",
    ),
    "latin.txt": Case(b"one\ntwo \xe9\n", {"not_utf8": 1}, [], "{file}:2: not UTF-8: byte 0xe9"),
    "long.txt": Case(b"x" * 10_001, {"too_long": 1}, [], "{file}:1: 10,001 bytes are more"),
    "cut.jsonl.gz": Case(CUT_GZ, {"cut": 1}, READABLE.count(b"\n"), "ends too early"),
    "cut.jsonl.zst": Case(zst(GOOD * 9) + zst(GOOD)[:-3], {"cut": 1}, 10, "ends too early"),
    "nothing.jsonl.gz": Case(
        gzip.compress(b"")[:9], {"cut": 1}, [], "{file}:1: the compressed data ends too early"
    ),
    "damaged.jsonl.gz": Case(
        flipped(gzip.compress(GOOD * 9), -6), {"damaged": 1}, 9, "{file}:10: "
    ),
    "damaged.jsonl.zst": Case(flipped(zst(GOOD * 9), -2), {"damaged": 1}, [], "{file}:1: "),
    "text.jsonl.gz": Case(b"text\n" * 9, {"damaged": 1}, [], "{file}:1: "),
    "bomb.jsonl.gz": Case(BOMB_GZ, {"expands": 1, "too_long": 1}, 1, "expands more than"),
    "text.parquet": Case(b"text\n" * 9, {"damaged": 1}, [], "cannot be read as Parquet"),
    "cut.parquet": Case(table(text=["a"])[:-9], {"damaged": 1}, [], "cannot be read as Parquet"),
    "other_column.parquet": Case(
        table(body=["a", "b", "c"]), {"no_text_field": 3}, [], "no column 'text'; it has body"
    ),
    "latin.parquet": Case(
        table(text=pa.array([b"a", b"\xe9"])), {"not_utf8": 1}, ["a"], "{file}:2: not UTF-8"
    ),
    "numbers.parquet": Case(table(text=[1, 2]), {"not_a_string": 2}, [], "int64, not string"),
    "surrogate.parquet": Case(table(text=SURROGATE), {"not_utf8": 1}, ["a"], "{file}:2: not UTF-8"),
    "long.parquet": Case(
        table(text=["a", "é" * 5001]), {"too_long": 1}, ["a"], "{file}:2: 10,002 bytes are more"
    ),
}  # fmt: skip
HARMLESS = {
    "null.jsonl": Case(GOOD + b'{"text": null}\n', {}, ["good"], "", {"null": 1}),
    "empty.jsonl": Case(GOOD + b'{"text": ""}\n', {}, ["good"], "", {"empty": 1}),
    "mark_only.txt": Case(b"\xef\xbb\xbf", {}, [], "", {"empty": 1}),
    **{
        f"no_bytes{suffix}": Case(b"", {}, [], "", {"no_bytes": 1})
        for suffix in (".txt", ".jsonl", ".jsonl.gz", ".csv", ".parquet", ".warc.gz", ".html")
    },
    "nothing.csv.gz": Case(gzip.compress(b""), {}, [], "", {"no_bytes": 1}),
    "bytes.parquet": Case(
        table(text=pa.array([b"\xc3\xa4", None, b"b"])),
        {},
        ["ä", "b"],
        "",
        {"null": 1},
    ),
    "nulls.parquet": Case(table(text=pa.nulls(3)), {}, [], "", {"null": 3}),
    "windows.jsonl": Case(b'{"text": "a"}\r\n\r\n', {}, ["a"], "", {"blank_lines": 1}),
    "mark.jsonl": Case(b'\xef\xbb\xbf{"text": "a"}', {}, ["a"], ""),
    "mark.txt": Case(b"\xef\xbb\xbfa", {}, ["a"], ""),
    "nul.jsonl": Case(rb'{"text": "a\u0000b", "x": NaN, "y": "\ud800"}', {}, ["a\0b"], ""),
    "nul.txt": Case(b"a\0b", {}, ["a\0b"], ""),
    "null.parquet": Case(table(text=["a", None, ""]), {}, ["a"], "", {"null": 1, "empty": 1}),
    "no_rows.parquet": Case(table(text=pa.array([], pa.string())), {}, [], ""),
}


def odd_files(directory: Path) -> dict[str, str]:
    """Create paths that cannot be opened as files; return {name: message}."""
    os.mkfifo(directory / "pipe.jsonl")
    (directory / "link.jsonl").symlink_to(directory / "absent")
    (directory / "loop.txt").symlink_to(directory / "loop.txt")
    Path(os.fsdecode(bytes(directory) + b"/caf\xe9.jsonl")).write_bytes(GOOD)
    messages = {
        r"caf\xe9.jsonl": "has a name that is not UTF-8",
        "pipe.jsonl": "it is neither a file nor a directory",
        "link.jsonl": "a broken link",
        "loop.txt": "is not a readable file",
    }
    if os.geteuid() != 0:  # root may read everything
        (directory / "secret.jsonl").write_bytes(GOOD)
        (directory / "secret.jsonl").chmod(0)
        messages["secret.jsonl"] = "Check its permissions"
    return messages
