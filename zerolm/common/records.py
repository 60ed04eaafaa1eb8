"""Reads JSON files, and checks those that our own programs wrote against a declared type.

A file may be torn by a power failure, edited, written by another release, or not a file at all.
Readers receive a value of the declared type, or an error of one line with the file, the key and the
problem. Types are `TypedDict` classes (which allow other keys), dataclasses (which do not), lists,
dicts, unions and scalars. Standard library only.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    BinaryIO,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from zerolm.common.errors import ConfigError, RecordError
from zerolm.common.files import barrier
from zerolm.common.secrets import masked

MAX_DEPTH = 100  # of nested lists and objects, so code may safely recurse into a value
MAX_DIGITS = 40  # of an integer, so it can be converted to a float
DAMAGED = "The file is damaged: restore it from a copy."

Count = Annotated[int, "not negative"]
Range = Annotated[list[int], "[start, end)"]  # a range of counts that is not empty
Name = Annotated[str, "name"]  # a file name without a directory
RelativePath = Annotated[str, "relative"]  # a path that stays within its base directory

_NAME = re.compile(r"\w[\w.-]{0,100}", re.ASCII)

T = TypeVar("T")


# ---- Files


def open_regular(path: str | Path) -> BinaryIO | None:
    """Open a file for reading; return None if nothing has that name.

    Raises:
        OSError: the path is a directory, a dangling link or a device, or cannot be opened. Opening
            never blocks, even on a named pipe without a writer.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except FileNotFoundError:
        if os.path.islink(path):  # noqa: PTH114 - path may be a str
            raise OSError("it is a link to a file that does not exist") from None
        return None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def read_file(path: str | Path) -> bytes | None:
    """Return the content of a file, or None if nothing has that name.

    Raises:
        OSError: as `open_regular`.
    """
    file = open_regular(path)
    if file is None:
        return None
    with file:
        return file.read()


def unreadable(path: object, error: Exception, fix: str, what: str = "cannot be read") -> str:
    """Return the message for an unreadable file; it ends in `fix` unless access is denied."""
    if isinstance(error, PermissionError):
        fix = f"Let this user read {barrier(str(path))}."
    return f"{path}: {what} ({why(error)}). {fix}"


def why(error: Exception) -> str:
    """Return the reason for a read or parse error, without the path."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {MAX_DEPTH} levels"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 at byte {error.start}"
    return str(error)


CONVERT_YAML = (
    "Convert it: python -c 'import json, sys, yaml; "
    "print(json.dumps(yaml.safe_load(sys.stdin), indent=2))' < FILE.yaml > FILE.json"
)


def read_json(
    path: str | Path, what: str, loads: Callable[..., Any] = json.loads
) -> dict[str, Any]:
    """Read a JSON object from a file written by the user.

    Args:
        what: description of the file for messages, such as "a model config".
        loads: `json.loads`, or a more lenient parser.

    Raises:
        ConfigError: the file is missing, unreadable, not JSON or not an object, or repeats a key.
    """
    try:
        content = read_file(path)
        if content is not None and not content.strip():  # a lenient parser would return {}
            raise ValueError("it is empty")
        value = None if content is None else parse_json(content, loads)
    except (ValueError, OSError, RecursionError) as error:
        if str(path).endswith((".yaml", ".yml")):
            raise ConfigError(f"{path}: is YAML, but JSON is read. {CONVERT_YAML}") from None
        message = unreadable(path, error, "Correct the file.", "cannot be read as JSON")
        raise ConfigError(message) from None
    if content is None:
        raise ConfigError(f"{path}: no such file. Name {what}.")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {_shown(value)} must be a JSON object. Name {what}.")
    return value


def read_record(path: str | Path, kind: type[T], fix: str = DAMAGED) -> T | None:
    """Read a JSON file that one of our programs wrote.

    Args:
        kind: the declared type of the content.
        fix: what the user can do about a damaged file.

    Returns:
        The content, or None if there is no such file.

    Raises:
        RecordError: the file cannot be read, is not JSON, or does not have this type. The message
            is one line.
    """
    try:
        content = read_file(path)
    except OSError as error:
        raise RecordError(unreadable(path, error, fix)) from None
    return None if content is None else parse_record(content, path, kind, fix)


def parse_record(content: bytes, where: object, kind: type[T], fix: str = DAMAGED) -> T:
    """Like `read_record`, but parse the content of a file that was already read.

    Args:
        where: the file's path or URL, for messages.

    Raises:
        RecordError: the content is not JSON, or does not have this type.
    """
    try:
        value = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where}: cannot be read as JSON ({why(error)}). {fix}") from None
    if problem := mismatch(value, kind):
        raise RecordError(f"{where}: {problem}. {fix}")
    return value


# ---- Digests


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its entry `digest`, in hex."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with `digest` added, converted to the types that JSON parses to."""
    content = json.loads(json.dumps(manifest))
    return {**content, "digest": manifest_digest(content)}


def digest_problem(manifest: Mapping[str, Any]) -> str:
    """Return a message if a manifest's `digest` exists but does not match its content, else ""."""
    stated = manifest.get("digest")
    if "digest" not in manifest or stated == (actual := manifest_digest(manifest)):
        return ""
    return f"digest: {_shown(stated)}, but its content has SHA-256 {actual}: it was changed"


# ---- JSON


def parse_json(content: bytes, loads: Callable[..., Any] = json.loads) -> Any:
    """Parse JSON into a value that is safe to recurse into, convert and print.

    Raises:
        ValueError: the content is not JSON or not UTF-8, repeats a key, nests deeper than
            `MAX_DEPTH`, or contains an integer of more than `MAX_DIGITS` digits or half of a
            surrogate pair.
        RecursionError: the content nests deeper than the parser can handle.
    """
    text = content.decode("utf-8").removeprefix("\ufeff")  # the byte order mark of Windows editors
    value = loads(text, object_pairs_hook=_unique, parse_int=_integer)
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if b"\\u" in content:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it contains half of a surrogate pair") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {repeated[:40]!r} occurs twice in one object")
    return unique


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it contains an integer of {len(text)} digits")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for each in level
            if isinstance(each, (list, dict))
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


# ---- Types


def mismatch(value: Any, kind: Any, key: str = "") -> str:
    """Return why a JSON value does not have a type, beginning with the dotted key; "" if it does.

    Args:
        kind: the expected type, which may contain nested `TypedDict` classes and dataclasses.
        key: the value's dotted key; "" for the entire content of a file.
    """
    if kind is Any:
        return ""
    if scalar := _SCALARS.get(kind):
        accepts, rule = scalar
        return "" if accepts(value) else _problem(value, rule, key)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        found = [mismatch(value, option, key) for option in arguments]
        return "" if "" in found else found[0]
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        if not isinstance(value, list):
            return _problem(value, "a list", key)
        parts = ((f"{key}[{number}]", part, arguments[0]) for number, part in enumerate(value))
    elif origin is tuple and arguments[-1] is not Ellipsis:
        if not isinstance(value, list) or len(value) != len(arguments):
            return _problem(value, f"a list of {len(arguments)}", key)
        numbered = enumerate(zip(value, arguments, strict=True))
        parts = ((f"{key}[{number}]", *pair) for number, pair in numbered)
    elif not isinstance(value, dict):
        return _problem(value, "an object", key)
    elif origin is dict:
        parts = ((_dotted(key, name), part, arguments[1]) for name, part in value.items())
    else:
        return _object_mismatch(value, kind, key)
    return next(filter(None, (mismatch(part, one, name) for name, part, one in parts)), "")


def _object_mismatch(value: Mapping[str, Any], kind: Any, key: str) -> str:
    kinds, required, closed = _keys(kind)
    for name in required:
        if name not in value:
            return f"{_dotted(key, name)}: missing"
    for name, part in value.items():
        if name in kinds:
            if problem := mismatch(part, kinds[name], _dotted(key, name)):
                return problem
        elif closed:
            return f"{_dotted(key, name)}: no such key"
    return ""


@functools.cache
def _keys(kind: Any) -> tuple[dict[str, Any], list[str], bool]:
    """Return an object type's keys with types, its required keys, and whether it refuses others."""
    if is_typeddict(kind):
        return get_type_hints(kind, include_extras=True), sorted(kind.__required_keys__), False
    assert dataclasses.is_dataclass(kind), kind
    required = [
        one.name
        for one in dataclasses.fields(kind)
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    ]
    return get_type_hints(kind, include_extras=True), required, True


def _dotted(key: str, name: str) -> str:
    name = _one_line(name)
    return f"{key}.{name}" if key else name


def _problem(value: Any, rule: str, key: str) -> str:
    return f"{key}: {_shown(value)} must be {rule}" if key else f"{_shown(value)} must be {rule}"


def _shown(value: Any) -> str:
    return _one_line(json.dumps(value))


def _one_line(text: str) -> str:
    text = text if text.isprintable() else repr(text)
    if len(text) <= 40:
        return text  # complete credentials are masked when the error is printed
    text = masked(text)  # must precede truncation: part of a credential would not be recognised
    return text if len(text) <= 40 else text[:37] + "..."


def _is_int(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_range(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) == 2
        and all(map(_is_count, value))
        and value[0] < value[1]
    )


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_relative(value: Any) -> bool:
    if type(value) is not str or not value or "\0" in value or "\\" in value:
        return False
    path = PurePosixPath(value)
    is_below = value != "." and not path.is_absolute() and ".." not in path.parts
    return is_below and str(path) == value


_SCALARS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda value: type(value) is str, "text"),
    bool: (lambda value: type(value) is bool, "true or false"),
    int: (_is_int, "a whole number"),
    float: (_is_number, "a finite number"),
    NoneType: (lambda value: value is None, "null"),
    Count: (_is_count, "a whole number, not negative"),
    Range: (_is_range, "a pair [start, end] of whole numbers, the first one smaller"),
    Name: (lambda value: type(value) is str and bool(_NAME.fullmatch(value)), "a plain name"),
    RelativePath: (_is_relative, "a path inside the directory"),
    dict: (lambda value: type(value) is dict, "an object"),
    list: (lambda value: type(value) is list, "a list"),
}
