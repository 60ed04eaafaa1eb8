"""Options for stages; one declaration defines both a recipe's key and a command's flag.

Imports only the standard library, so that `--help` is instant.
"""

import argparse
import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from zerolm.common.errors import ConfigError, unknown_keys
from zerolm.common.values import parse_bytes, parse_number

Options = TypeVar("Options")
MAX_NUMBER = (1 << 63) - 1
SWITCH = "on|off"
WHOLE, NUMBERS = (int, int | None), (int, int | None, float, float | None)
LIMITS = {"low": operator.ge, "high": operator.le, "above": operator.gt, "below": operator.lt}
KINDS: dict[Any, str] = {
    **dict.fromkeys(WHOLE, "a whole number"),
    **dict.fromkeys((float, float | None), "a number"),
    bool: "true or false",
    str: "a string",
    list: "a list",
    tuple[str, ...]: "a list of strings",
}


def option(default: Any = MISSING, help: str = "", shows: str | None = "N", **more: Any) -> Any:
    """Declare a field in a dataclass of options.

    Args:
        help: help text for the flag, to which the default is appended; "" if no command has the
            flag.
        shows: placeholder for the value in the help; `SWITCH` for a boolean flag that takes a
            value.
        more: `low`, `high` (inclusive limits), `above`, `below` (exclusive limits), `choices`,
            `flag` (the flag's name, if it differs from the key), `shown` (the default as shown in
            the help).
    """
    return field(default=default, metadata={"help": help, "shows": shows, **more})


def share(default: float, help: str, **more: Any) -> Any:
    """Declare a field that is a number from 0 to 1."""
    return option(default, help, "F", low=0, high=1, **more)


def _flag(one: Field) -> str:
    return f"--{one.metadata.get('flag', one.name)}"


def add_option_flags(parser: argparse.ArgumentParser, options_class: Any) -> None:
    """Add the flags defined by a dataclass of options."""
    for one in fields(options_class):
        if not (text := one.metadata.get("help")):
            continue
        more: dict[str, Any] = {"metavar": one.metadata["shows"]}
        shown = one.metadata.get("shown") or _shown(one)
        if one.type is bool and more["metavar"] == SWITCH:
            more["choices"] = ("on", "off")
        elif one.type is bool:
            more = {"action": "store_true", "default": None}
        elif one.type == tuple[str, ...]:
            more |= {"nargs": "+", "action": "extend"}
        more["help"] = f"{text} (default: {shown})" if shown else text
        parser.add_argument(_flag(one), dest=one.name, required=one.default is MISSING, **more)


def _shown(one: Field) -> str:
    default = one.default
    if default in (MISSING, None, (), ""):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if one.name.endswith("_bytes"):
        return f"{default >> 20}MiB" if default % (1 << 30) else f"{default >> 30}GiB"
    return default if isinstance(default, str) else f"{default:g}"


def options_of_flags(options_class: Any, given: argparse.Namespace) -> tuple[Any, list[str]]:
    """Convert a command's flags to options; return the options, and a line for each problem."""
    values = {
        one.name: content == "on" if one.metadata["shows"] == SWITCH else content
        for one in fields(options_class)
        if one.metadata.get("help") and (content := getattr(given, one.name)) is not None
    }
    return _read_all(options_class, values, _flag, "{} {}: is not {}.")


def parse_options(options_class: type[Options], value: Any, where: str) -> Options:
    """Convert a JSON object to a frozen dataclass of options; missing keys keep their defaults.

    The class may define a method `problems()`, which yields (key, problem) for values that are
    invalid together.

    Args:
        where: file and key for messages, as in `recipe.json: stages.dedup`.

    Raises:
        ConfigError: lists all problems.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {value!r} is not an object of options.")
    names = [one.name for one in fields(options_class)]  # type: ignore[arg-type]

    def place(one: Field) -> str:
        return f"{where}.{one.name}"

    options, found = _read_all(options_class, value, place, "{}: {!r} is not {}.")
    if problems := [*unknown_keys(where, value, names), *found]:
        raise ConfigError(problems)
    return options


def _read_all(
    options_class: Any, given: Mapping[str, Any], place: Callable[[Field], str], message: str
) -> tuple[Any, list[str]]:
    """Return options, and a line for each problem; invalid values are treated as missing."""
    by_name = {one.name: one for one in fields(options_class)}
    values, problems, missing = {}, [], []
    for name, one in by_name.items():
        if name not in given:
            missing += [f"{place(one)}: is missing."] if one.default is MISSING else []
        elif rule := _rule_against(one, given[name]):
            problems.append(message.format(place(one), given[name], rule))
        else:
            values[name] = _read(one, given[name])
        if one.default is MISSING:
            values.setdefault(name, one.metadata.get("low"))
    options = options_class(**values)
    if not missing and hasattr(options, "problems"):
        problems += [f"{place(by_name[key])}: {problem}" for key, problem in options.problems()]
    return options, problems + missing


def _read(one: Field, content: Any) -> Any:
    """Convert a JSON value to the type of its field: 1e9 becomes an int, a list becomes a tuple.

    A number may be a string such as "15M", or "500MB" if the key ends with `_bytes`.
    """
    if one.type in NUMBERS:
        if isinstance(content, str):
            parse = parse_bytes if one.name.endswith("_bytes") else parse_number
            with contextlib.suppress(ValueError):
                content = parse(content)
        is_whole = one.type in WHOLE and isinstance(content, float) and content.is_integer()
        return int(content) if is_whole else content
    return tuple(content) if isinstance(content, list) else content


def _rule_against(one: Field, content: Any) -> str:
    """Return the rule that a JSON value violates, or an empty string."""
    value, kind, about = _read(one, content), one.type, one.metadata
    if choices := about.get("choices"):
        return "" if value in choices else f"{', '.join(choices[:-1])} or {choices[-1]}"
    if kind in NUMBERS:
        kinds = (int,) if kind in WHOLE else (int, float)
        fits = (
            type(value) in kinds
            and abs(value) <= MAX_NUMBER
            and all(holds(value, about[name]) for name, holds in LIMITS.items() if name in about)
        )
        return "" if fits else KINDS[kind] + _limits(about)
    if kind == tuple[str, ...]:
        fits = isinstance(content, list) and all(isinstance(each, str) for each in content)
    else:
        fits = isinstance(content, kind)  # type: ignore[arg-type]
    return "" if fits else KINDS[kind]


def _limits(about: Mapping[str, Any]) -> str:
    """Format the limits of a number for messages."""
    if not LIMITS.keys() & about.keys():
        return ""
    if "below" in about:
        return f" of at least {about['low']:,} and below {about['below']:,}"
    start = f" from {about['low']:,}" if "low" in about else f" above {about['above']:,}"
    if "high" in about:
        return f"{start} {'to' if 'low' in about else 'and at most'} {about['high']:,}"
    return start + " up" * ("low" in about)
