"""A file is read as its declared type, or refused with one line that names it and the key."""

import json
import os
from dataclasses import dataclass
from typing import TypedDict

import pytest

from zerolm.common.errors import ConfigError, RecordError
from zerolm.common.records import (
    MAX_DEPTH,
    Count,
    Name,
    Range,
    RelativePath,
    parse_json,
    read_json,
    read_record,
)


@dataclass
class Closed:
    count: Count
    flag: bool = False


class Record(TypedDict, total=False):
    count: Count
    number: float
    name: Name
    path: RelativePath
    ranges: list[Range]
    pair: tuple[int, int] | None
    table: dict[str, list[int]]
    closed: Closed


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"count": 0, "number": 1, "name": "a-1", "path": "a/b.c", "ranges": [[0, 1]]},
        {"pair": None, "table": {"x": [], "y": [-1]}, "closed": {"count": 3}, "other": {"any": 1}},
        {"pair": [-1, 2], "number": -0.5, "count": 2**63 - 1},
    ],
)
def test_a_value_of_the_type_is_returned_as_it_is(tmp_path, value) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_record(tmp_path / "a.json", Record) == value


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"count": -1}', "count: -1 must be a whole number, not negative"),
        (b'{"count": true}', "count: true must be"),
        (b'{"count": 1.0}', "count: 1.0 must be"),
        (b'{"count": 9223372036854775808}', "count: 9223372036854775808 must be"),
        (b'{"number": NaN}', "number: NaN must be a finite number"),
        (b'{"number": 1e999}', "number: Infinity must be a finite number"),
        (b'{"number": "1"}', 'number: "1" must be'),
        (b'{"name": "../a"}', 'name: "../a" must be a plain name'),
        (b'{"path": "/etc"}', "path: "),
        (b'{"path": "."}', "path: "),
        (b'{"path": "a/../../b"}', "path: "),
        (b'{"path": "a\\u0000"}', "path: "),
        (b'{"ranges": [[1, 1]]}', "ranges[0]: [1, 1] must be a pair"),
        (b'{"pair": [1]}', "pair: [1] must be a list of 2"),
        (b'{"table": {"x": [1, "a"]}}', 'table.x[1]: "a" must be a whole number'),
        (b'{"table": []}', "table: [] must be an object"),
        (b'{"closed": {"flag": true}}', "closed.count: missing"),
        (b'{"closed": {"count": 1, "new": 2}}', "closed.new: no such key"),
        (b"[1]", "[1] must be an object"),
        (b"null", "null must be an object"),
        (b"", "cannot be read as JSON (Expecting value"),
        (b'{"count": 1', "cannot be read as JSON"),
        (b'{"count": 1, "count": 2}', "the key 'count' occurs twice in one object"),
        (b'{"x": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"x": "\\ud800"}', "half of a surrogate pair"),
        (b'{"x": ' + b"9" * 5000 + b"}", "an integer of 5000 digits"),
        (b'{"x": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper than 100 levels"),
        (b"[" * 200_000, "nested deeper than 100 levels"),
        (b'{"x":' * 200_000, "nested deeper than 100 levels"),
        (b"\0" * 100, "cannot be read as JSON"),
    ],
)
def test_anything_else_is_one_line_with_file_and_key(tmp_path, content, problem) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        read_record(path, Record)
    (line,) = caught.value.problems
    assert line.startswith(f"{path}: ") and problem in line and line.isprintable()
    assert len(line) < len(str(path)) + 200


@pytest.mark.parametrize("kind", ["directory", "dangling link", "pipe", "unreadable parent"])
def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path, kind) -> None:
    path = tmp_path / "a.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nothing")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("")
        path = path / "b.json"
    for read in (lambda: read_record(path, Record), lambda: read_json(path, "a file")):
        with pytest.raises(ConfigError, match=f"^{path}: cannot be read"):
            read()


def test_no_file_is_none_and_a_missing_user_file_is_an_error(tmp_path) -> None:
    assert read_record(tmp_path / "a.json", Record) is None
    with pytest.raises(ConfigError, match=r"a\.json: no such file. Name a thing"):
        read_json(tmp_path / "a.json", "a thing")


def test_numbers_and_text_that_programs_write_are_kept() -> None:
    value = {"a": [1, 1.5, -(10**30), 1e300], "b": "\u00e9 \U0001f600 \0", "c": [[[]]]}
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_a_byte_order_mark_changes_nothing(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}), encoding="utf-8-sig")
    assert read_json(path, "a config") == {"model_type": "llama"}
    assert read_record(path, dict) == {"model_type": "llama"}
