"""Values of Arrow tables as JSON types, and the type of the text column. Opens no files."""

import base64
import contextlib
from typing import Any

from data_prep.files.parse import find_text, replace_text
from data_prep.files.streams import Failure
from data_prep.formats.json_columns import decode_keys, is_json_type, json_decoder

MAX_ROWS = 8192  # in a list
NANOSECONDS = "time64[ns]"  # Python's times are precise to microseconds, and pyarrow drops the rest


def column_problem(schema: Any, text_field: str) -> Failure | None:
    """Return why a table has no text column, or None if it has one."""
    column_type = _column_type(schema, text_field)
    if column_type is None:
        return Failure(
            "no_text_field",
            f"no column {text_field!r}; it has {', '.join(schema.names)[:500]}. Choose a column "
            "with --text_field.",
        )
    if schema.names.count(text_field) > 1:
        return Failure("no_text_field", f"has several columns {text_field!r}. Rename all but one.")
    if not (is_text_type(column_type) or is_untyped(column_type)):
        return Failure(
            "not_a_string",
            f"column {text_field!r} has type {column_type}, not string. Choose another with "
            f"--text_field.",
        )
    return None


def _column_type(schema: object, text_field: str) -> object | None:
    """Return the type of a column or nested field, looked up by the rules of `find_text`."""
    import pyarrow as pa

    assert isinstance(schema, pa.Schema | pa.StructType)
    parts = text_field.split(".")
    for count in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:count]), ".".join(parts[count:])
        names = schema.names if isinstance(schema, pa.Schema) else [each.name for each in schema]
        if head not in names:
            continue
        column_type = schema.field(names.index(head)).type
        is_json = is_json_type(column_type)  # may have any keys
        column_type = _value_type(column_type)
        if not tail or is_json:
            return column_type
        if pa.types.is_struct(column_type):
            inner = _column_type(column_type, tail)
            if inner is not None:
                return inner
    return None


def entire_rows(batch: Any, field: str) -> list:
    """Return rows with all their columns, in JSON types.

    A value that Python cannot represent, such as a date after the year 9999 or text that is not
    UTF-8, does not affect other values.
    """
    is_exact = not any(NANOSECONDS in str(column.type) for column in batch.columns)
    try:
        rows = batch.to_pylist() if is_exact else None
    except value_errors():
        rows = None
    if rows is None:
        columns = {
            name: _exact_values(column, f"{field}.".startswith(f"{name}."))
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    has_text = lambda name: f"{field}.".startswith(f"{name}.")  # noqa: E731
    found = {each.name: json_decoder(each.type, has_text(each.name)) for each in batch.schema}
    if decoders := {name: decoder for name, decoder in found.items() if decoder is not None}:
        rows = [decode_keys(row, decoders) for row in rows]
    return json_rows(rows, field)


def _exact_values(column: Any, has_text: bool) -> list:
    """Return the values of a column, converted one by one if pyarrow cannot convert them together.

    Args:
        has_text: whether this is the text column, in which values that are not UTF-8 stay bytes.
    """
    if NANOSECONDS not in str(column.type):
        with contextlib.suppress(*value_errors()):
            return column.to_pylist()
    return [_exact_value(value, has_text) for value in column]


def _exact_value(value: Any, has_text: bool) -> Any:
    """Convert an Arrow scalar to JSON types without loss."""
    import pyarrow as pa

    kind = value.type
    if not value.is_valid:
        return None
    if isinstance(value, pa.StructScalar):
        fields = [_exact_value(value[number], has_text) for number in range(kind.num_fields)]
        names = [each.name for each in kind]
        if len(set(names)) < len(names):
            return [list(pair) for pair in zip(names, fields, strict=True)]
        return dict(zip(names, fields, strict=True))
    if isinstance(value, pa.MapScalar):
        pairs = ((each[0], each[1]) for each in value.values)
        return [[_exact_value(part, has_text) for part in pair] for pair in pairs]
    if isinstance(value, pa.ListScalar | pa.ListViewScalar | pa.LargeListViewScalar):
        return [_exact_value(each, has_text) for each in value.values]
    inner = (pa.ExtensionScalar, pa.DictionaryScalar, pa.RunEndEncodedScalar, pa.UnionScalar)
    if NANOSECONDS not in str(kind):
        try:
            return value.as_py()
        except value_errors():
            pass
    if isinstance(value, inner):
        return _exact_value(value.value, has_text)
    if is_text_type(kind):
        content = value.as_buffer().to_pybytes()
        return content if has_text else content.decode(errors="backslashreplace")
    return _time_text(value)


def _time_text(value: Any) -> str:
    """Format a date, a time (in UTC if it has a time zone), or a duration as text."""
    import pyarrow as pa

    if pa.types.is_duration(value.type):
        return f"{value.value} {value.type.unit}"
    zone = ""
    if pa.types.is_timestamp(value.type) and value.type.tz:
        value, zone = value.cast(pa.timestamp(value.type.unit)), "Z"
    text = value.cast(pa.string()).as_py()
    if text.startswith("<"):  # outside the range of years that Arrow can format
        unit = "ms" if pa.types.is_date64(value.type) else getattr(value.type, "unit", "days")
        return f"{value.value} {unit} since 1970"
    return text.replace(" ", "T", 1) + zone


def json_rows(rows: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Convert rows to JSON types, and decode the text if it is stored as UTF-8 bytes.

    Text that is not UTF-8 stays bytes, and a text of another type stays as it is; both are later
    counted as bad input.
    """
    converted = []
    for row in rows:
        text = find_text(row, field)[1]
        is_json = isinstance(text, str | dict | None)
        if isinstance(text, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                text = text.decode()
        row = json_values(row)
        converted.append(row if is_json else replace_text(row, field, text))
    return converted


def _value_type(column_type: Any) -> Any:
    import pyarrow as pa

    if isinstance(column_type, pa.BaseExtensionType):  # of JSON, for example
        column_type = column_type.storage_type
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def json_values(value: Any) -> Any:
    """Convert a value to JSON types: times to ISO 8601, bytes to base64, decimals to text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): json_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(inner) for inner in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def column_values(column: Any) -> list:
    """Return the texts of a column: as bytes if some are not UTF-8."""
    import pyarrow as pa

    if (decoder := json_decoder(column.type, has_text=True)) is not None:
        return [decoder(value) for value in column_values(column.storage)]
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # some value is not UTF-8: return all values as bytes
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return as_bytes(column).to_pylist()


def as_bytes(column: Any) -> Any:
    """Cast a text column to bytes, which need not be UTF-8."""
    import pyarrow as pa

    binary = pa.binary()
    if pa.types.is_large_string(column.type):
        binary = pa.large_binary()
    elif pa.types.is_string_view(column.type):
        binary = pa.binary_view()
    return column.view(binary)


def is_text_type(column_type: Any) -> bool:
    """Return whether an Arrow type is a string type."""
    import pyarrow as pa

    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(column_type) for is_kind in kinds)


def is_untyped(column_type: Any) -> bool:
    """Return whether a column type may contain undeclared text: bytes, or only nulls.

    Spark, Impala and DuckDB have written strings as bytes without a logical type.
    """
    import pyarrow as pa

    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(is_kind(column_type) for is_kind in (*kinds, pa.types.is_null))


def value_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions raised for values that Python cannot represent, such as KeyError for
    unknown time zones.
    """
    import pyarrow as pa

    return (pa.ArrowException, ValueError, OverflowError, KeyError)


def arrow_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that pyarrow raises for damaged files, which include built-in
    exceptions.
    """
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, NotImplementedError, OverflowError)
