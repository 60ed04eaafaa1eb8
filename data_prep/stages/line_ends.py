"""Defines where lines and paragraphs end, for filters and the items of evaluation sets.

Line ends of Windows (CRLF), old Macs (CR) and Unicode (U+0085, U+2028, U+2029), and form feeds
between pages, are all equivalent.
"""

import re

_LINE = "(?:\r\n|\r(?!\n)|[\n\v\f\x85\u2028])"
_BLANK = "[^\\S\n\r\v\f\x85\u2028\u2029]*"
PARAGRAPH_END = re.compile(f"((?:{_LINE}{_BLANK}(?:{_LINE}|\u2029)|\u2029)\\s*)")
_OTHER = re.compile("\r\n?|[\v\f\x85\u2028\u2029]")
_MARKS = "\r\v\f\x85\u2028\u2029"
# The equivalent for text with only LF line ends, which is much faster.
_LF_PARAGRAPH_END = re.compile("(\n[^\\S\n]*\n\\s*)")


def _has_other_ends(text: str) -> bool:
    return any(mark in text for mark in _MARKS)


def split_paragraphs(text: str) -> list[str]:
    """Split a text into paragraphs, alternating with the separators between them."""
    return (PARAGRAPH_END if _has_other_ends(text) else _LF_PARAGRAPH_END).split(text)


def with_line_feeds(text: str) -> str:
    """Convert all line ends in a text to LF."""
    if not _has_other_ends(text):
        return text
    return _OTHER.sub(lambda end: "\n\n" if end[0] == "\u2029" else "\n", text)
