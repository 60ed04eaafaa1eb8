"""CSV and TSV: rows as documents, equal to Python's csv module, and errors by line."""

import csv
import gzip
import io
import itertools
import random

import pytest

from data_prep.files.documents import InputRules
from data_prep.read.discovery import find_inputs
from data_prep.read.work_units import plan_units
from tests.data_prep.read.small_inputs import find, read_resuming
from zerolm.common.errors import ConfigError

RNG = random.Random(5)
WESTERN = "l’été dernier où j’ai rencontré un élève très fâché qui préférait les œuvres naïves"
PIECES = ["plain", 'a "quoted" word', "two\nlines", "comma, semicolon; tab\t", "é 漢字"]
PIECES.append("many words " * 30)
ROWS = [
    {"id": str(n), "text": f"{n} " + " ".join(RNG.choices(PIECES, k=4)), "lang": "en"}
    for n in range(150)
]


def content(delimiter=",", line_end="\r\n"):
    stream = io.StringIO()
    writer = csv.DictWriter(stream, ["id", "text", "lang"], delimiter=delimiter,
                            lineterminator=line_end)  # fmt: skip
    writer.writeheader()
    writer.writerows(ROWS)
    return stream.getvalue()


def read(path, encoding="utf-8", **rules):
    """Return (documents, tally), after a check that reading resumes after any batch."""
    rules = InputRules(keep_records=True, encoding=encoding, **rules)
    inputs = find([path], rules)
    assert len(plan_units(inputs, 100)) == 1
    return read_resuming(inputs, rules)


@pytest.mark.parametrize(
    ("form", "delimiter", "line_end"),
    [
        *itertools.product(["plain"], [",", ";", "\t"], ["\r\n", "\n"]),
        *itertools.product(["mark", "gzip", "utf-16", "cp1252"], [","], ["\r\n"]),
    ],
)
def test_rows_are_those_of_the_csv_module(tmp_path, delimiter, line_end, form):
    text = content(delimiter, line_end)
    data, name, encoding = text.encode(), "a.tsv" if delimiter == "\t" else "a.csv", "utf-8"
    if form == "gzip":
        data, name = gzip.compress(data), f"{name}.gz"
    elif form == "mark":
        data = "\ufeff".encode() + data
    elif form == "utf-16":
        data, encoding = text.encode("utf-16"), "auto"
    elif form == "cp1252":
        data, encoding = text.replace("漢字", WESTERN).encode("cp1252"), "auto"
    path = tmp_path / name
    path.write_bytes(data)
    documents, tally = read(path, encoding)
    expected = [row | {"text": row["text"]} for row in ROWS]
    if form == "cp1252":
        expected = [row | {"text": row["text"].replace("漢字", WESTERN)} for row in ROWS]
    if line_end == "\r\n":
        assert [each.record for each in documents] == expected
    assert [each.text for each in documents] == [row["text"] for row in expected]
    assert tally.input_bytes == len(data)
    assert tally.changed == ({f"from {form}": 150} if encoding == "auto" else {})
    if form in ("plain", "mark"):
        starts = [each.start for each in documents]
        assert all(data[start:].startswith(f"{n}{delimiter}".encode())
                   for n, start in enumerate(starts))  # fmt: skip


def test_bad_rows_are_named_by_line(tmp_path):
    path = tmp_path / "a.csv"
    lines = [b"id,text", b"1,good", b"2,too,many", b"3", b"4,caf\xe9", b'5,"two', b'lines"', b"",
             b"6,", b"7," + b"x" * 500, b"8,last"]  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        read(path, max_document_bytes=400)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        f"{path}:3", f"{path}:4", f"{path}:5", f"{path}:10",
    ]  # fmt: skip
    assert "the row has 3 fields, but the header has 2" in str(caught.value)
    assert "byte 0xe9. Name its encoding with --encoding" in str(caught.value)
    documents, tally = read(path, on_bad_input="skip", max_document_bytes=400)
    assert [each.text for each in documents] == ["good", "two\nlines", "last"]
    assert tally.bad == {"fields": 2, "not_utf8": 1, "too_long": 1}
    assert tally.skipped == {"blank_lines": 1, "empty": 1}


def test_a_quote_without_an_end_loses_the_rest_and_says_so(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,good\n2,"no end\n3,good\n4,good\n')
    with pytest.raises(ConfigError, match=r"a\.csv:3: the file is not CSV from.*: a quote has no"):
        read(path)
    documents, tally = read(path, on_bad_input="skip", max_bad_fraction=1.0)
    assert len(documents) == 1 and tally.lost_bytes == len(b'2,"no end\n3,good\n4,good\n')
    path = tmp_path / "b.csv.gz"
    path.write_bytes(gzip.compress(content().encode())[:-200])
    documents, tally = read(path, on_bad_input="skip", max_bad_fraction=1.0)
    assert 10 < len(documents) < 150 and tally.bad == {"cut": 1}
    assert [each.record for each in documents] == ROWS[: len(documents)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_row_that_is_not_csv_costs_only_itself(tmp_path, encoding):
    """Text after a closing quote, or a carriage return inside a field."""
    rows = [f"{n},after {n}" for n in range(1000)]
    bad = {3: '3,"quoted" junk', 400: '400,"two\nlines" and more', 700: "7\r00,x"}
    lines = [bad.get(n, row) for n, row in enumerate(rows)]
    path = tmp_path / "a.csv"
    header = '"number\nof the row",text'
    path.write_bytes("\n".join([header, *lines]).encode(encoding))
    documents, tally = read(path, encoding, on_bad_input="skip")
    assert [each.text for each in documents] == [
        f"after {n}" for n in range(1000) if n not in bad
    ]  # fmt: skip
    assert documents[5].record == {"number\nof the row": "6", "text": "after 6"}
    assert tally.bad == {"fields": 3} and tally.lost_bytes == 0
    with pytest.raises(ConfigError) as caught:
        read(path, encoding)
    first, second, third = caught.value.problems
    assert first.startswith(f"{path}:6: the row is not CSV (',' expected after")
    assert second.startswith(f"{path}:403: ") and third.startswith(f"{path}:704: ")


def test_a_header_without_the_text_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("id;body\n1;x\n")
    (tmp_path / "b.csv").write_text("\n")
    (tmp_path / "c.tsv").write_text("text\ttext\nx\ty\n")
    (tmp_path / "d.csv").write_bytes(b"id,text\r1,x\r2,y\r")
    with pytest.raises(ConfigError) as caught:
        find_inputs([str(tmp_path)], "text")
    first, second, third, fourth = caught.value.problems
    assert "d.csv: has a header that is not CSV (new-line character" in fourth
    assert "no column 'text'; it has id;body. Choose a column with --text_field" in first
    assert "b.csv: has no header" in second and "several columns 'text'" in third
