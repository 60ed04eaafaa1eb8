"""Reads the values of a DeepSpeed JSON as DeepSpeed does, and finds problems with its keys.

`Profile` reads its file once, through `read`, so rules, plan, run.json and engine agree that
`"true"` and 1 are true, and 2.0 is 2. DeepSpeed ignores unknown keys at the top level and in some
blocks, so a typo there would go unnoticed. zerolm/engine/config_keys.py lists the keys and their
types; `rules` checks which values work together.
"""

import enum
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from zerolm.common.errors import did_you_mean
from zerolm.common.remembered import recall
from zerolm.common.values import shown
from zerolm.engine.config_keys import (
    AUTO,
    Block,
    OpenBlock,
    RuleError,
    known_keys,
    removed_keys,
)

# `rules` and `parallel_rules` refuse most of these, with better messages than a type check.
CHECKED_BY_RULES = (
    "autotuning",
    "data_efficiency",
    "data_parallel_size",
    "datastates_ckpt",
    "expert_parallel",
    "fp8",
    "hybrid_engine",
    "pipeline",
    "sequence_parallel_size",
    "tensor_parallel",
    "weight_quantization",
)


def read(written: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert every value of a DeepSpeed JSON as DeepSpeed does; return the JSON and its problems.

    Unknown keys, and values that DeepSpeed refuses, are left as written.

    Args:
        written: the JSON as written, without comments.
    """
    values = dict(written)
    if isinstance(zero := values.get("zero_optimization"), bool):  # runtime/zero/config.py
        size = {"allgather_bucket_size": values.pop("allgather_size", 500_000_000)}
        values["zero_optimization"] = {"stage": 1, **size} if zero else {"stage": 0}
    if not values:
        return {}, []
    return recall("deepspeed-json", values, lambda: _read_keys(values), list, tuple)


def _read_keys(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    problems = []
    types, removed = known_keys(), removed_keys("TOP_LEVEL")
    for key, value in values.items():
        if key in removed:
            problems.append(f"{key}: DeepSpeed has removed this key: {removed[key]} Remove it.")
        elif key not in types:
            problems.append(f"{key}: {_unknown(key, types)}")
        else:
            found: list[str] = []
            values[key], known = _as_read(types[key], value, key, found)
            if key not in CHECKED_BY_RULES:
                problems += found + _type_problems(types[key], known, key)
    return values, problems


def _as_read(kind: Any, value: Any, where: str, problems: list[str]) -> tuple[Any, Any]:
    """Return a value as DeepSpeed reads it, and the part of it to check: no "auto" or unknown keys.

    Args:
        where: dotted key of the value.
        problems: receives unknown keys.
    """
    model = inner_model(kind)
    if model is None:
        try:
            read = _adapter(kind).validate_python(value)
        except ValidationError:
            return value, value
        read = read.value if isinstance(read, enum.Enum) else read
        return (read if isinstance(read, (bool, int, float, str, type(None))) else value), value
    if not isinstance(value, Mapping):
        return value, value
    removed = removed_keys("ZERO") if where == "zero_optimization" else {}
    fields, values, known = model_fields(model), dict(value), {}
    key_by_key = issubclass(model, Block)
    for key, inner in value.items():
        if key in removed:
            problems.append(
                f"{where}.{key}: DeepSpeed has removed this key: {removed[key]} Remove it."
            )
        elif key in fields:
            kind, path = fields[key].annotation, f"{where}.{key}"
            if (alias := fields[key].alias) and alias not in value:
                values[alias] = values.pop(key)
                key = alias
            if inner != AUTO or (key_by_key and inner_model(kind)):
                values[key], known[key] = _as_read(kind, inner, path, problems)
        elif not issubclass(model, OpenBlock):
            problems.append(f"{where}.{key}: {_unknown(key, fields, key_by_key)}")
    return values, known


def _type_problems(kind: Any, value: Any, where: str) -> list[str]:
    """Return why a value does not have the required type, or why a pydantic model refuses it."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        return [
            _problem(".".join([where, *map(str, found["loc"])]), found)
            for found in error.errors()
            if where != "zero_optimization" or not _is_for_rules(found)
        ]
    except (AssertionError, AttributeError, TypeError) as error:
        return [f"{where}: is refused by DeepSpeed: {error}. Correct the block."]
    return []


def _is_for_rules(found: Any) -> bool:
    """Return whether `rules` reports a problem of `zero_optimization`, as it does with the stage
    and with the combinations that the block's own validators check.
    """
    return found["loc"] == ("stage",) or isinstance(found["input"], BaseModel)


def _problem(where: str, found: Any) -> str:
    if isinstance(rule := found.get("ctx", {}).get("error"), RuleError):
        return f"{where}: {shown(found['input'])} {rule}"
    given = "" if isinstance(found["input"], Mapping) else f"{shown(found['input'])} "
    if found["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where}: {given}must be an object. Write {{...}} or remove it."
    message = found["msg"].rstrip(".")
    return f"{where}: {given}is refused by DeepSpeed: {message}. Correct the value."


def inner_model(kind: Any) -> Any:
    """Return the pydantic model in the type `Model` or `Optional[Model]`; None for other types."""
    for candidate in (kind, *get_args(kind)):
        if inspect.isclass(candidate) and hasattr(candidate, "model_fields"):
            return candidate
    return None


def model_fields(model: Any) -> dict[str, Any]:
    """Return a pydantic model's fields as {name or alias: field}."""
    fields = dict(model.model_fields)
    return fields | {field.alias: field for field in fields.values() if field.alias}


@functools.cache
def _adapter(kind: Any) -> Any:
    is_model = inner_model(kind) is kind
    return TypeAdapter(kind, config=None if is_model else ConfigDict(arbitrary_types_allowed=True))


def _unknown(key: str, choices: Iterable[str], is_ignored: bool = True) -> str:
    hint = did_you_mean(key, choices) or " Correct or remove it."
    return f"unknown key{', DeepSpeed would ignore it' if is_ignored else ''}.{hint}"
