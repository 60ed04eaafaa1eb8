"""Parses the options of a stage from a recipe: checks keys and types, and reports all problems."""

import dataclasses
from typing import Any, TypeVar

from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.common.values import parse_bytes, parse_number

Options = TypeVar("Options")
MAX_NUMBER = (1 << 63) - 1


def parse_options(options_class: type[Options], value: Any, where: str) -> Options:
    """Return a frozen dataclass of options from a JSON object; missing keys keep their defaults.

    The method `problems()` of the class yields (key, problem) for values of the right type that are
    not allowed.

    Args:
        where: file and key for messages, as in `recipe.json: stages.dedup`.

    Raises:
        ConfigError: all problems.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {value!r} is not an object of options.")
    fields = {field.name: field for field in dataclasses.fields(options_class)}  # type: ignore[arg-type]
    problems = []
    arguments = {}
    for key, content in value.items():
        if key in fields and fields[key].type in (int, float):
            content = number_of(key, content)
        if key not in fields:
            known = ", ".join(fields)
            hint = did_you_mean(key, fields)
            problems.append(f"{where}.{key}: is not an option.{hint} Known: {known}.")
        elif (expected := _wrong_type(fields[key].type, content)) is not None:
            problems.append(f"{where}.{key}: {content!r} is not {expected}.")
        else:
            arguments[key] = _converted(fields[key].type, content)
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in value
    ]
    problems += [f"{where}.{name}: is missing." for name in missing]
    if not problems:
        options = options_class(**arguments)
        problems = [f"{where}.{key}: {problem}" for key, problem in options.problems()]  # type: ignore[attr-defined]
    if problems:
        raise ConfigError(problems)
    return options


def number_of(key: str, value: Any) -> Any:
    """Return the number of a string such as "15M", or "500MB" for a key that ends in `_bytes`.

    Any other value is returned as it is.
    """
    try:
        parse = parse_bytes if key.endswith("_bytes") else parse_number
        return parse(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _converted(annotation: Any, content: Any) -> Any:
    """Return a JSON value in the type of its field: 1e9 becomes an int, a list a tuple."""
    if annotation is int:
        return int(content)
    return tuple(content) if isinstance(content, list) else content


def _wrong_type(annotation: Any, content: Any) -> str | None:
    """Return a description of the required type; None if the value has it."""
    is_number = isinstance(content, int | float) and not isinstance(content, bool)
    is_number = is_number and -MAX_NUMBER <= content <= MAX_NUMBER  # neither NaN nor infinite
    rules = {
        int: (is_number and content == int(content), "a whole number"),
        float: (is_number, "a number"),
        float | None: (is_number, "a number"),
        bool: (isinstance(content, bool), "true or false"),
        str: (isinstance(content, str), "a string"),
        tuple[str, ...]: (
            isinstance(content, list) and all(isinstance(each, str) for each in content),
            "a list of strings",
        ),
    }
    is_right, expected = rules[annotation]
    return None if is_right else expected
