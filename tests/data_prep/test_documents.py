"""data_prep/documents.py: what is a document, and what a broken one is called."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.documents import MAX_PROBLEMS, Chunk, read_documents


def lines(data: bytes, first: int = 1) -> Chunk:
    return Chunk("a.jsonl", "lines", first, data, len(data))


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1)))
def test_json_lines_give_their_texts(texts):
    """Whatever is in them, U+2028 and other line ends of Unicode too, escaped in JSON or not."""
    for ascii_only in (True, False):
        data = "".join(json.dumps({"text": t}, ensure_ascii=ascii_only) + "\n" for t in texts)
        documents, skipped, problems = read_documents([lines(data.encode())], "text")
        assert [document.text for document in documents] == texts
        assert not skipped and not problems


def test_what_is_harmless_is_counted():
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
        (b'{"text": 5}', "the text is 5, a int and not a string"),
        (b'{"text": ["a"]}', "a list and not a string"),
        (b'{"text": "a\xff"}', "not UTF-8: byte 0xff"),
        (b'{"text": "a\\ud800"}', r"lone surrogate (U+D800, character 1)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_broken_line_is_named_by_its_number(line, named):
    data = b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n'
    _, _, problems = read_documents([lines(data, first=41)], "text")
    assert len(problems) == 1
    assert problems[0].startswith("a.jsonl:43: ") and named in problems[0]


def test_several_broken_lines_are_listed_but_not_without_end():
    _, _, problems = read_documents([lines(b"x\n" * 1000)], "text")
    assert [problem.split(":")[1] for problem in problems] == [
        str(n + 1) for n in range(MAX_PROBLEMS)
    ]


def test_a_text_file_is_one_document_as_it_is():
    text = "\r\nfirst\rsecond\n\n  "
    chunk = Chunk("a.txt", "text", 1, text.encode(), 0)
    assert read_documents([chunk], "text")[0][0].text == text
    broken = Chunk("b.txt", "text", 1, b"one\ntwo\nth\xe9ee\n", 0)
    assert read_documents([broken], "text")[2][0].startswith("b.txt:3: not UTF-8: byte 0xe9")


def test_a_byte_order_mark_is_not_text():
    mark = b"\xef\xbb\xbf"
    chunks = [Chunk("a.txt", "text", 1, mark + b"a", 0), lines(mark + b'{"text": "b"}\n')]
    assert [document.text for document in read_documents(chunks, "text")[0]] == ["a", "b"]


def test_rows_are_named_by_their_number():
    chunk = Chunk("a.parquet", "rows", 10, ["a", None, "", "b", "\ud800"], 0)
    documents, skipped, problems = read_documents([chunk], "text")
    assert [document.text for document in documents] == ["a", "b"]
    assert skipped == {"null": 1, "empty": 1} and problems[0].startswith("a.parquet:14: ")
