"""Parse and format values as users write them: numbers with suffixes, byte counts, durations.

Must not know any setting. Parsers raise a ValueError that states the rule and the fix; the caller
adds the setting's name and value.
"""

import json
import math
import os
import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
MAX_COUNT = 10**18  # fits in 64 bits, with headroom for sums
UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode
JOINERS = "\u200c\u200d"
BINARY_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def printable(text: str, kept: str = "") -> str:
    """Return text from a file for a terminal, with control characters escaped as in JSON:
    `\\u001b`.

    Control characters could recolour, clear or retitle the terminal, and bidirectional ones could
    display the text in a misleading order. The joiners of Persian, Hindi and emoji are kept, and so
    are the characters in `kept`.
    """
    if text.isprintable():
        return text
    return "".join(
        json.dumps(character)[1:-1]
        if unicodedata.category(character) in UNPRINTABLE and character not in kept + JOINERS
        else character
        for character in text
    )


def shown(value: Any) -> str:
    """Format a value as JSON, so a string is distinguishable from a number."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text.isprintable() else json.dumps(value, default=str)


def shown_setting(where: str, value: Any) -> str:
    """Format a value as the user wrote it: as typed on the command line, or as JSON in a file."""
    if isinstance(value, str) and value.isprintable() and where.startswith("command line"):
        return value or '""'
    return shown(value)


def shown_bytes(count: float) -> str:
    """Format a byte count with three digits and a binary unit: 1.23 GiB."""
    return _scaled(count, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def count(number: float) -> str:
    """Format a large count with three digits and a decimal unit: 1.23M."""
    return _scaled(number, 1000, ("", "k", "M", "B", "T", "Q"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    *smaller, largest = units
    for unit in smaller:
        if not number >= 999.5:  # also true for NaN; 999.5 with three digits would be 1e+03
            return f"{number:.3g}{unit}"
        number /= step
    return f"{number:.3g}{largest}"


def parse_number(value: Any) -> int | float:
    """Parse `3e9`, `3B`, `500M`, `2k` or a JSON number; return an int if there is no fraction.

    Raises:
        ValueError: the text is not a finite number of at most 10^30.
    """
    text, factor = str(value).strip().lower(), 1
    if isinstance(value, str) and text[-1:] in SUFFIXES:
        text, factor = text[:-1], SUFFIXES[text[-1]]
    try:
        number = Decimal(text) * factor  # in decimal, so 2.3B is an int
    except ArithmeticError:
        raise ValueError("is not a number. Write for example 3e9, 3B, 500M or 2k.") from None
    if not number.is_finite() or number.adjusted() > 30:
        raise ValueError("is too large or not finite. Give a smaller, finite number.")
    return int(number) if number == int(number) else float(number)


def parse_count(value: Any) -> int:
    """Parse an integer in any form that `parse_number` accepts."""
    number = parse_number(value)
    if isinstance(number, float):
        raise ValueError("must be a whole number. Round it.")
    if abs(number) > MAX_COUNT:
        raise ValueError("must be at most 10^18. Give a smaller number.")
    return number


def parse_real(value: Any) -> float:
    """Parse a real number in any form that `parse_number` accepts."""
    return float(parse_number(value))


def within(
    value: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a number if it is within the bounds.

    Raises:
        ValueError: the number is out of bounds; the message states the bound and the fix.
    """
    if minimum is not None and value < minimum:
        raise ValueError(f"must be at least {minimum}. Give a larger number.")
    if above is not None and value <= above:
        raise ValueError(f"must be above {above}. Give a larger number.")
    if maximum is not None and value > maximum:
        raise ValueError(f"must be at most {maximum}. Give a smaller number.")
    if below is not None and value >= below:
        raise ValueError(f"must be below {below}. Give a smaller number.")
    return value


def parse_path(text: str) -> str:
    """Expand a leading `~`, which the shell does not expand in `--flag=~/path` and files."""
    return os.path.expanduser(text)  # noqa: PTH111 (Path drops a trailing slash)


def parse_bytes(value: Any) -> int:
    """Parse a byte count: `5GB`, `500MB`, `32GiB`, or any form that `parse_count` accepts."""
    text = str(value).strip().lower()
    if (unit := BINARY_UNITS.get(text[-3:])) is not None:
        return parse_count(float(parse_number(text[:-3]) * unit))
    if re.search(r"[kmgt]b$", text):
        return parse_count(text[:-1])
    return parse_count(value)


def strict_json(value: Any, **options: Any) -> str:
    """Return a value as JSON that every parser can read: non-finite numbers become null.

    Args:
        options: keyword arguments of `json.dumps`.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_duration(value: Any) -> float:
    """Parse `3h50m`, `90s`, `2d` or a number of seconds; return seconds."""
    text = str(value).strip().lower()
    if re.fullmatch(r"[\d.]+(e\d+)?", text):
        text += "s"
    parts = re.findall(r"([\d.]+(?:e\d+)?)([dhms])", text)
    if isinstance(value, bool) or not parts or "".join(map("".join, parts)) != text:
        raise ValueError("is not a duration. Write for example 3h50m, 90s or 2d.")
    try:
        return sum(float(number) * SECONDS[unit] for number, unit in parts)
    except ValueError:
        raise ValueError("is not a duration. Write for example 3h50m, 90s or 2d.") from None


def duration(seconds: float) -> str:
    """Format seconds as 40d06h, 1d02h03m, 2h03m, 3m04s or 5s; "unknown" if not finite."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h" + (f"{minutes:02}m" if days < 10 else "")
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds_left:02}s" if minutes else f"{seconds_left}s"


def shown_seconds(seconds: float) -> str:
    """Format a measured or planned time: 0.0123 s, 12.3 s, 2m03s."""
    return f"{seconds:.3g} s" if seconds < 99.95 else duration(seconds)


def split_evenly(total: int, available: Sequence[int]) -> list[int]:
    """Split a total into one part for each cap, as evenly as the caps allow.

    Args:
        available: the cap of each part. If the total exceeds the sum of the caps, the excess is
            dropped.

    Returns:
        The parts, in the order of the caps; remainders go to the parts with the largest caps.
    """
    parts = [0] * len(available)
    smallest_first = sorted(range(len(available)), key=lambda index: (available[index], -index))
    for done, index in enumerate(smallest_first):
        parts[index] = min(available[index], total // (len(available) - done))
        total -= parts[index]
    return parts


class Tensor(NamedTuple):
    """The shape and dtype of a tensor that has not been read; the dtype is torch's name for it."""

    shape: tuple[int, ...]
    dtype: str
