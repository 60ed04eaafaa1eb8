"""Values as users write them: numbers with suffixes, durations, switches, JSON objects.

Knows no setting and no key: settings.py and ds_config.py say what a value is for. Each function
raises a ValueError whose text is the rule and the fix, so that the caller can put the place before.
"""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from zerolm.errors import ConfigError, did_you_mean
from zerolm.recomputation import WRITTEN

SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def shown(value: Any) -> str:
    """Return a value as it stands in a file or on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def shown_bytes(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def parse_number(value: Any) -> int | float:
    """Read `3e9`, `3B`, `500M`, `2k` or a JSON number: an int when it is whole."""
    text, factor = str(value).strip().lower(), 1
    if isinstance(value, str) and text[-1:] in SUFFIXES:
        text, factor = text[:-1], SUFFIXES[text[-1]]
    try:
        number = Decimal(text) * factor  # in decimal: 2.3B is a whole number
    except ArithmeticError:
        raise ValueError("not a number. Write for example 3e9, 3B, 500M or 2k.") from None
    if not number.is_finite() or number.adjusted() > 30:
        raise ValueError("not a number of a possible size. Give a finite one.")
    return int(number) if number == int(number) else float(number)


def _count_of(value: Any) -> int:
    number = parse_number(value)
    if isinstance(number, float):
        raise ValueError("must be a whole number. Round it.")
    return number


def _duration(value: Any) -> float:
    text = str(value).strip().lower()
    if re.fullmatch(r"[\d.]+", text):
        text += "s"
    parts = re.findall(r"([\d.]+)([dhms])", text)
    if isinstance(value, bool) or not parts or "".join(map("".join, parts)) != text:
        raise ValueError("not a duration. Write for example 3h50m, 90s or 2d.")
    try:
        return sum(float(number) * SECONDS[unit] for number, unit in parts)
    except ValueError:
        raise ValueError("not a duration. Write for example 3h50m, 90s or 2d.") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be text. Write it in quotes, not empty.")
    return value


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError("must be true or false.")


def _recompute(value: Any) -> bool | str:
    """Read a switch that also has a middle; `full` and `off` are its true and false."""
    if (written := str(value).lower()) not in WRITTEN:
        raise ValueError(f"must be full, selective or off.{did_you_mean(written, WRITTEN)}")
    return WRITTEN[written]


def _list(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise ValueError('must be a list of text. Write for example ["shards/web=0.7"].')
    return tuple(_text(value) for value in values)


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "count": _count_of,
    "real": lambda value: float(parse_number(value)),
    "duration": _duration,
    "text": _text,
    "switch": _truth,
    "recompute": _recompute,
    "list": _list,
}


def read_json(
    path: str | Path, what: str, loads: Callable[..., Any] = json.loads
) -> dict[str, Any]:
    """Read a JSON object, refusing duplicate keys.

    Args:
        what: what the file should be, for messages.
        loads: json.loads, or that of a more lenient reader.

    Raises:
        ConfigError: the file is missing, unreadable, not JSON, or not an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
        if twice:
            raise ValueError(f"the key {twice[0]!r} stands twice in one object")
        return dict(pairs)

    try:
        value = loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Name {what}.") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}). Correct the file.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {shown(value)[:40]}, must be a JSON object. Name {what}.")
    return value


def count(number: float) -> str:
    """Write a large count with a unit, three digits: 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Write seconds as 1d02h03m, 2h03m, 3m04s or 5s."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h{minutes:02}m"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds_left:02}s" if minutes else f"{seconds_left}s"
