"""Decodes columns of Arrow's type JSON, whose values are JSON literals in a string.

`datasets` writes them for JSON lines with values of several types, and DuckDB for its type JSON.
Independent of files.
"""

import json
from collections.abc import Callable
from typing import Any

Decoder = Callable[[Any], Any]


def is_json_type(column_type: Any) -> bool:
    """Return whether an Arrow type is the extension type for JSON."""
    return getattr(column_type, "extension_name", None) == "arrow.json"


def json_decoder(column_type: Any, has_text: bool) -> Decoder | None:
    """Return a function that decodes the JSON in a value of `to_pylist`; None if there is none.

    Args:
        has_text: whether documents are in this column: invalid JSON is then no string, and
            reported; otherwise it stays as it is.
    """
    import pyarrow as pa

    if is_json_type(column_type):
        return lambda value: None if value is None else _decoded(value, has_text)
    if pa.types.is_struct(column_type):
        found = {each.name: json_decoder(each.type, has_text) for each in column_type}
        decoders = {name: decoder for name, decoder in found.items() if decoder is not None}
        is_named = len(found) == column_type.num_fields  # otherwise a value is a list of pairs
        return (lambda value: decode_keys(value, decoders)) if decoders and is_named else None
    is_map = pa.types.is_map(column_type)
    if not is_map and not hasattr(column_type, "value_field"):  # which lists have
        return None
    inner = json_decoder(column_type.item_type if is_map else column_type.value_type, has_text)
    if inner is None:
        return None
    if is_map:
        return lambda value: value and [(key, inner(item)) for key, item in value]
    return lambda value: value and [inner(each) for each in value]


def decode_keys(row: Any, decoders: dict[str, Decoder]) -> Any:
    """Return a row or object with the values of some keys decoded."""
    return row and {
        key: decoders[key](value) if key in decoders else value for key, value in row.items()
    }


def _decoded(value: str, has_text: bool) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        return error if has_text else value
