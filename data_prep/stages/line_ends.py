"""Defines where lines and paragraphs end, for filters and the items of evaluation sets.

The line ends of Unix (LF), Windows (CRLF), old Macs (CR) and Unicode (U+0085, U+2028, U+2029) are
all equivalent, as are form feeds between pages.
"""

import re

_LINE = "(?:\r\n|\r(?!\n)|[\n\v\f\x85\u2028])"
_BLANK = "[^\\S\n\r\v\f\x85\u2028\u2029]*"
PARAGRAPH_END = re.compile(f"((?:{_LINE}{_BLANK}(?:{_LINE}|\u2029)|\u2029)\\s*)")
_OTHER = re.compile("\r\n?|[\v\f\x85\u2028\u2029]")
_MARKS = "\r\v\f\x85\u2028\u2029"
# An equivalent pattern for text that has only LF line ends; it is much faster.
_LF_PARAGRAPH_END = re.compile("(\n[^\\S\n]*\n\\s*)")


def _has_other_ends(text: str) -> bool:
    return any(mark in text for mark in _MARKS)


def split_paragraphs(text: str) -> list[str]:
    """Split a text into a list in which paragraphs alternate with the separators between them."""
    return (PARAGRAPH_END if _has_other_ends(text) else _LF_PARAGRAPH_END).split(text)


def with_line_feeds(text: str) -> str:
    """Convert all line ends in a text to LF."""
    if not _has_other_ends(text):
        return text
    return _OTHER.sub(lambda end: "\n\n" if end[0] == "\u2029" else "\n", text)
