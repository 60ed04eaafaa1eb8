"""Reads evaluation items: texts from evaluation sets that a training corpus must not contain.

`NgramIndex` searches documents for them.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.files.parse import find_text
from data_prep.files.streams import COMPRESSIONS, Stream
from data_prep.formats.arrow_values import entire_rows
from data_prep.formats.json_lines import JSON, JSON_LINES, lines_suffix
from data_prep.formats.parquet import PARQUET
from data_prep.formats.text import TEXT
from data_prep.stages.line_ends import split_paragraphs
from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.common.files import pointer_problem_of
from zerolm.common.records import unreadable

ENDINGS = tuple(suffix for each in (TEXT, JSON_LINES, JSON, PARQUET) for suffix in each.suffixes)
SHOWN_ENDINGS = ".txt, .md, .jsonl, .ndjson, JSON lines in .json (also compressed) and .parquet"
WIKIHOW_MARK = re.compile(r"\[.*?\]")  # in HellaSwag: [header], [title], ...
MAX_PROBLEMS = 10


class Item(NamedTuple):
    """One item of an evaluation set."""

    place: str  # file:line, or file:paragraph
    texts: list[str]  # each text is searched for separately


def split_evaluation(argument: str) -> tuple[Path, list[str]]:
    """Split an argument, PATH or PATH:field,field, into the path and the list of fields."""
    path, colon, fields = argument.rpartition(":")
    if colon and not Path(argument).exists():
        return Path(path), [field.strip() for field in fields.split(",")]
    return Path(argument), []


def read_all_items(arguments: Sequence[str]) -> list[Item]:
    """Read the items of all evaluation files.

    Raises:
        ConfigError: some files have problems; the error lists all of them.
    """
    items: list[Item] = []
    problems: list[str] = []
    for argument in arguments:
        try:
            items += read_items(argument)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return items


def read_items(argument: str) -> list[Item]:
    """Read the items in a file; the argument is PATH or PATH:field,field.

    In text files, items are paragraphs separated by empty lines. In JSON lines and Parquet files,
    each line or row is an item. An item's texts are the values of the given fields, which are
    strings or lists of strings. The field `a.b` is the key "b" of the object stored under "a". If
    no fields are given, the texts are `ctx` followed by each of the `endings` if the item has these
    keys of HellaSwag, and otherwise `text`.

    Raises:
        ConfigError: the file cannot be read, or lacks the fields.
    """
    path, fields = split_evaluation(argument)
    if not path.is_file():
        raise ConfigError(f"--evaluation {argument}: no such file. Check the path.")
    if pointer := pointer_problem_of(path):
        raise ConfigError(f"--evaluation {argument}: {pointer}")
    is_lines = path.suffix == ".json" and lines_suffix(str(path), "text") is not None
    if not (path.name.endswith(ENDINGS) or is_lines):
        raise ConfigError(
            f"--evaluation {argument}: is not one of {SHOWN_ENDINGS}. Convert or rename it."
        )
    if _is_text(path) and fields:
        raise ConfigError(f"--evaluation {argument}: a text file has no fields. Remove them.")
    items = []
    problems = []
    try:
        for place, record in _records(path):
            texts = [record] if isinstance(record, str) else _texts(record, fields)
            if isinstance(texts, str):
                problems.append(f"--evaluation {place}: {texts}")
            else:
                items.append(Item(place, texts))
            if len(problems) == MAX_PROBLEMS:
                break
    except (OSError, EOFError, ValueError) as error:
        message = unreadable(argument, error, "Restore the file.")
        raise ConfigError(f"--evaluation {message}") from error
    if problems:
        raise ConfigError(problems)
    if not items:
        raise ConfigError(f"--evaluation {argument}: contains no items. Check the path.")
    return items


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each item (a line, row or paragraph) as ("file:number", item), numbered from 1."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows = (row for batch in pq.read_table(path).to_batches() for row in entire_rows(batch, ""))
        yield from ((f"{path}:{number}", row) for number, row in enumerate(rows, 1))
        return
    text = _content(path).decode("utf-8-sig")
    if _is_text(path):
        paragraphs = [part for part in split_paragraphs(text)[::2] if part.strip()]
        yield from ((f"{path}:{number}", part) for number, part in enumerate(paragraphs, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def _is_text(path: Path) -> bool:
    name = path.stem if path.suffix in COMPRESSIONS else path.name
    return Path(name).suffix in TEXT.endings


def _content(path: Path) -> bytes:
    stream = Stream(str(path), path.name, 0, max_expansion=1 << 40)
    content = b"".join(stream)
    if stream.failure is not None:
        if stream.failure.reason == "unreadable":
            raise ConfigError(f"--evaluation {path}: {stream.failure.detail}")
        raise ValueError(stream.failure.detail)
    return content


def _texts(record: Any, fields: list[str]) -> list[str] | str:
    """Return the texts of an item, or an error message if the item is not valid."""
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}, not an object."
    if not fields and {"ctx", "endings"} <= set(record):
        return _hellaswag(record)
    texts: list[str] = []
    for field in fields or ["text"]:
        found, value = find_text(record, field)
        if not found:
            keys = ", ".join(map(repr, list(record)[:8])) or "no keys"
            hint = did_you_mean(field, record)
            return f"has no key {field!r}, only {keys}.{hint} Name fields as PATH:field,field."
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) for each in values):
            return f"{field}: {str(value)[:60]!r} is neither a string nor a list of strings."
        texts += values
    return texts


def _hellaswag(record: dict[str, Any]) -> list[str] | str:
    context, endings = record["ctx"], record["endings"]
    if not isinstance(context, str) or not isinstance(endings, list):
        return "ctx is not a string, or endings is not a list."
    texts = [f"{context} {ending}" for ending in endings]
    # The WikiHow pages from which the items were taken do not contain these marks.
    return list(dict.fromkeys([*texts, *(WIKIHOW_MARK.sub(" ", text) for text in texts)]))
