"""Rows of Parquet: a row group in lists of bounded size, and values as JSON has them."""

import base64
from collections.abc import Iterator
from typing import Any

from data_prep.documents import InputRules
from data_prep.streams import Failure

TABLE_ROWS = 8192


class Refused(ValueError):
    """A row group that is not read."""

    def __init__(self, failure: Failure):
        super().__init__(failure.detail)
        self.failure = failure


def group_values(file: Any, group: int, skip: int, rules: InputRules, size: int) -> Iterator[list]:
    """Yield the rows of a row group behind the first `skip`, in lists of about `size` bytes."""
    metadata = file.metadata.row_group(group)
    field = rules.text_field
    names = None if rules.keep_records else [field]
    plain = names is not None and field in file.schema_arrow.names
    columns = [metadata.column(number) for number in range(metadata.num_columns)]
    if names is not None:
        columns = [
            column
            for column in columns
            if column.path_in_schema == field or column.path_in_schema.startswith(field + ".")
        ]
    stored = sum(column.total_compressed_size for column in columns)
    expanded = sum(column.total_uncompressed_size for column in columns)
    if expanded > max(64 << 20, rules.max_expansion * stored):
        raise Refused(
            Failure(
                "expands",
                f"row group {group} expands from {stored:,} to {expanded:,} bytes, more than "
                f"--max_expansion {rules.max_expansion} times. If it is meant to, raise the limit.",
            )
        )
    rows = min(max(1, size * metadata.num_rows // max(expanded, 1)), TABLE_ROWS)
    for batch in file.iter_batches(rows, row_groups=[group], columns=names):
        if skip >= len(batch):
            skip -= len(batch)
            continue
        batch, skip = batch.slice(skip), 0
        if plain:
            yield _column_values(batch.column(0))
        else:
            yield _whole_rows(batch, field)


def _whole_rows(batch: Any, field: str) -> list:
    """Return rows with all of their columns, where one value that is not UTF-8 loses no other."""
    import pyarrow as pa

    try:
        return json_values(batch.to_pylist())
    except UnicodeDecodeError:
        pass
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = _column_values(column)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            columns[name] = [_decoded(value, name == field) for value in values]
        else:
            columns[name] = json_values(values)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _decoded(value: bytes | str | None, is_text: bool) -> bytes | str | None:
    """Return a string; of the text, bytes that are none, for whoever counts bad documents."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value if is_text else value.decode(errors="backslashreplace")


def json_values(value: Any) -> Any:
    """Return rows as JSON has them: times in ISO 8601, bytes in base64, decimals as text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): json_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(inner) for inner in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _column_values(column: Any) -> list:
    import pyarrow as pa

    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # each value for itself, as bytes: one of them is not UTF-8
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        large = pa.types.is_large_string(column.type)
        return column.view(pa.large_binary() if large else pa.binary()).to_pylist()


def reading_errors() -> tuple[type[BaseException], ...]:
    """Return what pyarrow raises for a damaged file; its own errors are not all built-in ones."""
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, NotImplementedError, OverflowError)
