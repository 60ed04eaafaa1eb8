"""Where lines and paragraphs end, for every filter and stage that splits a text.

A text means the same with the line ends of Windows (CRLF), of old Macs (CR), of Unicode (U+0085,
U+2028, U+2029), and with form feeds between its pages.
"""

import re

_LINE = "(?:\r\n|\r(?!\n)|[\n\v\f\x85\u2028])"
_BLANK = "[^\\S\n\r\v\f\x85\u2028\u2029]*"
LINE_END = re.compile(f"({_LINE}|\u2029)")
PARAGRAPH_END = re.compile(f"((?:{_LINE}{_BLANK}(?:{_LINE}|\u2029)|\u2029)\\s*)")
_OTHER = re.compile("\r\n?|[\v\f\x85\u2028\u2029]")
_MARKS = "\r\v\f\x85\u2028\u2029"
# The same in a text whose lines end in LF alone, much faster.
_LF = re.compile("(\n)")
_LF_PARAGRAPH_END = re.compile("(\n[^\\S\n]*\n\\s*)")


def _has_other_ends(text: str) -> bool:
    return any(mark in text for mark in _MARKS)


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, and between each two what separates them."""
    return (LINE_END if _has_other_ends(text) else _LF).split(text)


def split_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, and between each two what separates them."""
    return (PARAGRAPH_END if _has_other_ends(text) else _LF_PARAGRAPH_END).split(text)


def with_line_feeds(text: str) -> str:
    """Return a text whose lines end in LF alone."""
    if not _has_other_ends(text):
        return text
    return _OTHER.sub(lambda end: "\n\n" if end[0] == "\u2029" else "\n", text)
