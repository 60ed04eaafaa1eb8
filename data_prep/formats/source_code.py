"""Reads source files as one document each, with language and license; `identify` names them."""

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import END, Input, InputRange
from data_prep.files.parse import parse_text
from data_prep.formats.format import Format
from data_prep.formats.text import read_file

NOT_LANGUAGES = {"text", "header", "plain-text", "executable", "non-executable"}
SHOWN_UNKNOWN = "unknown"
_LICENSE_FILE = re.compile(r"(un)?licen[cs]e|copying", re.IGNORECASE)
_HEADER = re.compile(rb"SPDX-License-Identifier:[ \t]*([\w.+() -]*[\w.+)])")
HEADER_BYTES = 1 << 12
BINARY_BYTES = 8192  # a zero byte within the first bytes marks a source file as binary, as in git


def language_of(path: str) -> str | None:
    """Return a file's language, such as `python`, from its name; None if it is not text."""
    from identify.identify import tags_from_filename

    tags = tags_from_filename(path)
    if "text" not in tags:
        return None
    return min(tags - NOT_LANGUAGES, default="text")


def code_keys(path: str, top: str) -> tuple[tuple[str, str], ...]:
    """Return keys for a file's document: path relative to `top`, language and license."""
    language = language_of(path) or "text"
    keys = {"path": os.path.relpath(path, top), "language": language}
    license = _license_of(str(Path(path).parent), top)
    return tuple((keys | ({"license": license} if license else {})).items())


@lru_cache(maxsize=1 << 16)
def _license_of(directory: str, top: str) -> str:
    """Return a directory's license, from the nearest license file between the directory and `top`.

    Returns:
        SPDX identifiers joined with OR, "unknown" for any other license text, or "" if there is no
        license file.
    """
    files = sorted(path for path in Path(directory).iterdir() if _LICENSE_FILE.match(path.name))
    found = {_identify(path) for path in files if path.is_file()}
    if found:
        return " OR ".join(sorted(found - {SHOWN_UNKNOWN})) or SHOWN_UNKNOWN
    if Path(directory) == Path(top) or Path(top) not in Path(directory).parents:
        return ""
    return _license_of(str(Path(directory).parent), top)


def _identify(path: Path) -> str:
    from identify.identify import license_id

    try:
        return license_id(str(path)) or SHOWN_UNKNOWN
    except (OSError, UnicodeDecodeError):
        return SHOWN_UNKNOWN


def header_license(content: bytes) -> Mapping[str, str]:
    """Return the license named in a file's header, which takes precedence over license files."""
    match = _HEADER.search(content[:HEADER_BYTES])
    return {"license": match[1].decode().strip()} if match else {}


def _read(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    chunk = read_file(source, part, rules)
    if chunk.kind == "text" and b"\0" in chunk.data[:BINARY_BYTES]:
        chunk = chunk._replace(kind="skipped", data="binary")
    elif chunk.kind == "text":
        keys = {**dict(chunk.keys), **header_license(chunk.data)}
        chunk = chunk._replace(keys=tuple(keys.items()))
    yield chunk, END


CODE = Format(  # of any file of a code tree, whatever its name
    (".code",),
    _read,
    parse_text,
    packages=("identify",),
    reasons={"binary": "binary files in code trees"},
)
