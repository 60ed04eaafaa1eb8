"""Options of a stage out of a recipe: known keys, right types, and all problems at once."""

import dataclasses
from typing import Any, TypeVar

from zerolm.errors import ConfigError, did_you_mean

Options = TypeVar("Options")
LARGEST = (1 << 63) - 1  # number


def options_from(kind: type[Options], value: Any, where: str) -> Options:
    """Return a frozen dataclass of options, made from a JSON object; its defaults stay.

    Its `problems()` returns (key, what is wrong) of values of the right types.

    Args:
        where: `recipe.json: stages.dedup`, for messages.

    Raises:
        ConfigError: all problems.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {value!r} is not an object of options.")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    problems = []
    given = {}
    for key, content in value.items():
        if key not in fields:
            known = ", ".join(fields)
            hint = did_you_mean(key, fields)
            problems.append(f"{where}.{key}: is not an option.{hint} Known: {known}.")
        elif (wanted := _wrong_type(fields[key].type, content)) is not None:
            problems.append(f"{where}.{key}: {content!r} is not {wanted}.")
        else:
            given[key] = _as(fields[key].type, content)
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in value
    ]
    problems += [f"{where}.{name}: is missing." for name in missing]
    if not problems:
        options = kind(**given)
        problems = [f"{where}.{key}: {what}" for key, what in options.problems()]  # type: ignore[attr-defined]
    if problems:
        raise ConfigError(problems)
    return options


def _as(annotation: Any, content: Any) -> Any:
    """Return a value of JSON as what its field holds: 1e9 is a whole number too."""
    if annotation is int:
        return int(content)
    return tuple(content) if isinstance(content, list) else content


def _wrong_type(annotation: Any, content: Any) -> str | None:
    """Say what a value should be and is not."""
    is_number = isinstance(content, int | float) and not isinstance(content, bool)
    is_number = is_number and -LARGEST <= content <= LARGEST  # neither NaN nor infinite
    rules = {
        int: (is_number and content == int(content), "a whole number"),
        float: (is_number, "a number"),
        bool: (isinstance(content, bool), "true or false"),
        str: (isinstance(content, str), "a string"),
        tuple[str, ...]: (
            isinstance(content, list) and all(isinstance(each, str) for each in content),
            "a list of strings",
        ),
    }
    right, wanted = rules[annotation]
    return None if right else wanted
