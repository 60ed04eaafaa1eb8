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


def with_line_feeds(text: str) -> str:
    """Return a text whose lines end in LF alone."""
    return _OTHER.sub(lambda end: "\n\n" if end[0] == "\u2029" else "\n", text)
