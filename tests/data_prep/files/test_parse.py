"""Parsing: what is a document, and how a broken one is reported."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.parse import parse_chunk, parse_rows, parse_text
from data_prep.formats.json_lines import parse_lines

PARSERS = {"lines": parse_lines, "rows": parse_rows, "text": parse_text}


def lines(data: bytes, start: int = 0) -> Chunk:
    return Chunk("a.jsonl", "lines", start, data, len(data))


def read_documents(chunks, field="text", **rules):
    """Parse each chunk on its own, and join the results."""
    given = InputRules(field, **rules)
    found = [parse_chunk(chunk, given, PARSERS[chunk.kind]) for chunk in chunks]
    return (
        [document for documents, _, _ in found for document in documents],
        sum((skipped for _, skipped, _ in found), Counter()),
        [problem for _, _, problems in found for problem in problems],
    )


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1)))
def test_json_lines_give_their_texts(texts):
    """For any content, such as U+2028 and other Unicode line ends, escaped in JSON or not."""
    for ascii_only in (True, False):
        data = "".join(json.dumps({"text": t}, ensure_ascii=ascii_only) + "\n" for t in texts)
        documents, skipped, problems = read_documents([lines(data.encode())], "text")
        assert [document.text for document in documents] == texts
        assert not skipped and not problems


def test_empty_and_null_documents_and_blank_lines_are_counted():
    data = b'{"text": "a"}\n\n{"text": ""}\r\n{"text": null}\n  \n{"text": "b"}'
    documents, skipped, problems = read_documents([lines(data)], "text")
    assert [document.text for document in documents] == ["a", "b"]
    assert skipped == {"blank_lines": 2, "empty": 1, "null": 1} and not problems


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b'{"text": "a"', "not valid JSON"),
        (b"text", "not valid JSON"),
        (b'{"text": "a"} {"text": "b"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["a"]', "a JSON list, not an object"),
        (b'{"body": "a"}', "no key 'text'; it has 'body'"),
        (b"{}", "no key 'text'; it has no keys"),
        (b'{"text": 5}', "the text is 5, of type int, not a string"),
        (b'{"text": ["a"]}', "of type list, not a string"),
        (b'{"text": "a\xff"}', "not UTF-8: byte 0xff"),
        (b'{"text": "a\\ud800"}', r"lone surrogate (U+D800, character 1)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_broken_line_is_reported_with_its_place(line, named):
    before = b'{"text": "a"}\n\n'
    data = before + line + b'\n{"text": "b"}\n'
    documents, _, problems = read_documents([lines(data, start=1000)], "text")
    assert [document.text for document in documents] == ["a", "b"]
    assert len(problems) == 1 and named in problems[0].detail and problems[0].num_documents == 1
    assert 1000 + len(before) <= problems[0].start < 1000 + len(before + line)


def test_a_text_file_is_one_unchanged_document():
    text = "\r\nfirst\rsecond\n\n  "
    chunk = Chunk("a.txt", "text", 0, text.encode(), 0)
    assert read_documents([chunk], "text")[0][0].text == text
    broken = Chunk("b.txt", "text", 0, b"one\ntwo\nth\xe9ee\n", 0)
    (problem,) = read_documents([broken], "text")[2]
    assert problem.start == 10 and problem.detail.startswith("not UTF-8: byte 0xe9")


def test_a_byte_order_mark_is_dropped():
    mark = b"\xef\xbb\xbf"
    chunks = [Chunk("a.txt", "text", 0, mark + b"a", 0), lines(mark + b'{"text": "b"}\n')]
    assert [document.text for document in read_documents(chunks, "text")[0]] == ["a", "b"]


def test_problems_of_rows_have_their_row_number():
    values = ["a", None, "", "b", "\ud800", b"c", b"\xff", 5]
    documents, skipped, problems = read_documents([Chunk("a.parquet", "rows", 10, values, 0)])
    assert [(document.text, document.start) for document in documents] == [
        ("a", 10),
        ("b", 13),
        ("c", 15),
    ]
    assert skipped == {"null": 1, "empty": 1}
    assert [(each.reason, each.start, each.is_row) for each in problems] == [
        ("lone_surrogate", 14, True),
        ("not_utf8", 16, True),
        ("not_a_string", 17, True),
    ]


ODD = st.sampled_from(
    [
        *(None, True, "", "a", "\ud800", "ž\U0001f600", "\ud83d\ude00", "\0", ["a"], {"text": "a"}),
        *(0, -1.5, float("nan"), float("inf"), 1 << 63, 1 << 64, -(1 << 90), 1e300, [1 << 80]),
    ]
)


@given(st.lists(st.fixed_dictionaries({}, optional={"text": ODD, "id": ODD}), max_size=5))
def test_results_equal_those_of_json(records):
    """Python's own parser decides, whatever the fast one refuses or rounds."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    parsed = [json.loads(line) for line in data.splitlines()]

    def is_text(value):
        return isinstance(value, str) and value != "" and value != "\ud800"

    proper = [record for record in parsed if is_text(record.get("text"))]
    for keep in (False, True):
        documents, skipped, problems = read_documents([lines(data)], keep_records=keep)
        assert [document.text for document in documents] == [each["text"] for each in proper]
        texts = [record.get("text", 0) for record in parsed]
        assert skipped["null"] == sum(text is None for text in texts)
        assert skipped["empty"] == texts.count("")
        assert len(documents) + skipped.total() + len(problems) == len(records)
    whole = [document.record for document in documents if [1 << 80] not in document.record.values()]
    assert json.dumps(whole) == json.dumps(
        [record for record in proper if [1 << 80] not in record.values()]
    )


@given(st.binary(max_size=40), st.sampled_from([b'{"text": "%s"}', b'{"text": %s}', b"%s"]))
def test_any_bytes_are_accepted_or_refused_as_by_json(garbage, around):
    line = (around % garbage).replace(b"\n", b"")
    documents, skipped, problems = read_documents([lines(line + b"\n")])
    try:
        text = json.loads(line.decode())["text"]
        text.encode()
    except Exception:
        assert not documents and len(problems) + skipped.total() == 1
    else:
        assert [document.text for document in documents] == ([text] if text else [])


def test_a_dotted_field_is_a_key_or_else_a_path():
    data = b"".join(
        line + b"\n"
        for line in (
            b'{"a": {"b": "path"}}',
            b'{"a.b": "key", "a": {"b": "path"}}',
            b'{"a": {"b": null}}',
            b'{"a": "b"}',
            b'{"a": {"c": "b"}}',
            b'{"a": {"b": "\\ud800"}, "x": NaN}',
            b'{"a": {"b": "nan"}, "x": NaN}',
        )
    )
    documents, skipped, problems = read_documents([lines(data)], "a.b")
    assert [document.text for document in documents] == ["path", "key", "nan"]
    assert skipped == {"null": 1}
    assert [each.reason for each in problems] == [
        "no_text_field", "no_text_field", "lone_surrogate",
    ]  # fmt: skip


def test_the_size_limit_is_exact_to_the_byte():
    """All bytes of a line count; of a row, those of the text in UTF-8."""
    line = b'{"text": "abc"}'
    for limit, expected in ((len(line), ["abc"]), (len(line) - 1, [])):
        documents, _, problems = read_documents([lines(line + b"\n")], max_document_bytes=limit)
        assert [document.text for document in documents] == expected
        assert [each.reason for each in problems] == ["too_long"] * (not expected)
    rows = Chunk("a.parquet", "rows", 0, ["žž", "žžž", "abcd", "abcde"], 0)
    documents, _, problems = read_documents([rows], max_document_bytes=4)
    assert [document.text for document in documents] == ["žž", "abcd"] and len(problems) == 2
