"""The formats of input files: one module each, and the list of them.

Must not depend on how inputs are found and divided.
"""

from itertools import groupby

from data_prep.files.documents import REASONS
from data_prep.files.inputs import Input
from data_prep.formats.arrow import ARROW
from data_prep.formats.csv_rows import CSV
from data_prep.formats.format import Format
from data_prep.formats.hub_stream import HUB
from data_prep.formats.json_lines import JSON, JSON_LINES
from data_prep.formats.pages import PAGES
from data_prep.formats.parquet import PARQUET
from data_prep.formats.source_code import CODE
from data_prep.formats.text import TEXT
from data_prep.formats.warc import WARC

FORMATS = (TEXT, PAGES, CSV, JSON_LINES, JSON, WARC, PARQUET, ARROW)  # found by the file's name


def suffix_of(path: str) -> str | None:
    """Return the suffix of a format that a path ends with, or None."""
    name = path.lower()
    suffixes = (suffix for each in FORMATS for suffix in each.suffixes)
    return next((suffix for suffix in suffixes if name.endswith(suffix)), None)


def format_of(source: Input) -> Format:
    """Return the format of a file, or of a hub dataset; that of an unreadable file may be wrong."""
    found = {end: each for each in (*FORMATS, CODE, HUB) for end in each.endings}
    return found.get(max(filter(source.suffix.startswith, found), key=len, default=""), JSON_LINES)


def shown_endings() -> str:
    """Return the endings of all formats, for messages."""
    parts = []
    for compressions, formats in groupby(FORMATS, lambda each: each.compressions):
        listed = ", ".join(end for each in formats for end in each.shown or each.endings)
        parts.append(f"{listed} (also {', '.join(compressions)})" if compressions else listed)
    return ", ".join(parts)


def help_of_endings() -> str:
    """Return the endings of all formats with what becomes a document, for --help."""
    return "; ".join(each.help or " or ".join(each.endings) for each in FORMATS)


def describe_reason(reason: str) -> str:
    """Return the description of a reason for bad or skipped input, or the reason itself."""
    own = (each.reasons[reason] for each in (*FORMATS, CODE) if reason in each.reasons)
    return REASONS.get(reason) or next(own, reason)
