"""Reads the rows of Parquet and Arrow files in lists of bounded size, with values in JSON types."""

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

from data_prep.read.documents import InputRules
from data_prep.read.parse import find_text, replace_text
from data_prep.read.streams import MIN_CHECKED_BYTES, Failure
from zerolm.common.errors import reason

MAX_ROWS = 8192  # in a list
NANOSECONDS = "time64[ns]"  # Python's times are precise to microseconds, and pyarrow drops the rest


class RowGroupRefused(ValueError):
    """A row group was refused because its data expands too much when decompressed."""

    def __init__(self, failure: Failure):
        super().__init__(failure.detail)
        self.failure = failure


def check_parquet(stored: Any, text_field: str) -> tuple[Failure | None, int]:
    """Check a Parquet file; return why it has no text column, or None, and its number of rows.

    Args:
        stored: the file, or its path.
    """
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(stored)
        schema = metadata.schema.to_arrow_schema()
    except parquet_errors() as error:
        problem = f"cannot be read as Parquet ({reason(error, named=False)})"
        return Failure("damaged", f"{problem}. Restore or remove the file."), 0
    failure = _column_problem(schema, text_field)
    return failure, metadata.num_rows


def _column_problem(schema: Any, text_field: str) -> Failure | None:
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


def check_arrow(stored: Any, text_field: str) -> Failure | None:
    """Return why an Arrow file has no text column, or None if it has one; see `open_arrow`."""
    try:
        return _column_problem(open_arrow(stored)[0], text_field)
    except parquet_errors() as error:
        return arrow_failure(error)


def arrow_failure(error: BaseException) -> Failure:
    """Return a failure that reports a damaged Arrow file."""
    problem = f"cannot be read as Arrow ({reason(error, named=False)})"
    return Failure("damaged", f"{problem}. Restore the file, or remove it.")


def open_arrow(stored: Any) -> tuple[Any, Iterator[Any]]:
    """Open an Arrow file, either a stream (as written by `datasets`) or Feather; return its schema
    and its batches.

    Args:
        stored: the file, or its path.
    """
    import pyarrow as pa

    file = pa.memory_map(stored) if isinstance(stored, str) else pa.PythonFile(stored)
    is_feather = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_feather:
        reader = pa.ipc.open_stream(file)
        return reader.schema, iter(reader)
    reader = pa.ipc.open_file(file)
    return reader.schema, map(reader.get_batch, range(reader.num_record_batches))


def read_batch(batch: Any, skip: int, rules: InputRules, chunk_bytes: int) -> Iterator[list]:
    """Yield the rows of a batch after the first `skip` rows, in lists; see `read_row_group`.

    Raises:
        ArrowInvalid: the batch is damaged, so that pyarrow would read outside the batch's memory.
    """
    for column in batch.columns:
        _validate(column)
    count = min(max(1, chunk_bytes * len(batch) // max(batch.nbytes, 1)), MAX_ROWS)
    is_text_column = not rules.keep_records and rules.text_field in batch.schema.names
    for start in range(skip, len(batch), count):
        rows = batch.slice(start, count)
        if is_text_column:
            yield _column_values(rows.column(rules.text_field))
        else:
            yield entire_rows(rows, rules.text_field)


def _validate(column: Any) -> None:
    """Check that no value is outside the column's memory; the values themselves are not checked."""
    import pyarrow as pa

    column.validate()
    if isinstance(column, pa.StructArray):
        for number in range(column.type.num_fields):
            _validate(column.field(number))
    elif isinstance(column, pa.MapArray | pa.ListArray | pa.LargeListArray):
        is_map, is_large = isinstance(column, pa.MapArray), isinstance(column, pa.LargeListArray)
        parts = [column.keys, column.items] if is_map else [column.values]
        lists = pa.LargeListArray if is_large else pa.ListArray
        lists.from_arrays(column.offsets, pa.nulls(len(parts[0]))).validate(full=True)
        for part in parts:
            _validate(part)
    elif isinstance(column, pa.FixedSizeListArray):
        _validate(column.values)
    elif isinstance(column, pa.DictionaryArray):
        column.indices.validate(full=True)
        pa.DictionaryArray.from_arrays(column.indices, pa.nulls(len(column.dictionary)))
        _validate(column.dictionary)
    elif isinstance(column, pa.ExtensionArray):
        _validate(column.storage)
    elif not pa.types.is_temporal(column.type):
        (_as_bytes(column) if is_text_type(column.type) else column).validate(full=True)


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
        column_type = _value_type(schema.field(names.index(head)).type)
        if not tail:
            return column_type
        if pa.types.is_struct(column_type):
            inner = _column_type(column_type, tail)
            if inner is not None:
                return inner
    return None


def read_row_group(
    file: Any, group: int, skip: int, rules: InputRules, chunk_bytes: int
) -> Iterator[list]:
    """Yield the rows of a row group after the first `skip` rows, in lists of about `chunk_bytes`.

    A row is represented by its text, or by a dict if `keep_records` is set or the text field is a
    path into objects.

    Raises:
        RowGroupRefused: the row group expands more than `max_expansion` times.
    """
    metadata = file.metadata.row_group(group)
    field = rules.text_field
    names = None if rules.keep_records else [field]
    is_text_column = names is not None and field in file.schema_arrow.names
    columns = [metadata.column(number) for number in range(metadata.num_columns)]
    if names is not None:
        columns = [
            column
            for column in columns
            if column.path_in_schema == field or column.path_in_schema.startswith(field + ".")
        ]
    stored = sum(column.total_compressed_size for column in columns)
    expanded = sum(column.total_uncompressed_size for column in columns)
    if expanded > max(MIN_CHECKED_BYTES, rules.max_expansion * stored):
        raise RowGroupRefused(
            Failure(
                "expands",
                f"row group {group} expands from {stored:,} to {expanded:,} bytes, more than "
                f"--max_expansion {rules.max_expansion} times. If that is correct, raise the "
                f"limit.",
            )
        )
    num_rows = min(max(1, chunk_bytes * metadata.num_rows // max(expanded, 1)), MAX_ROWS)
    for batch in file.iter_batches(num_rows, row_groups=[group], columns=names):
        if skip >= len(batch):
            skip -= len(batch)
            continue
        batch, skip = batch.slice(skip), 0
        if is_text_column:
            yield _column_values(batch.column(0))
        else:
            yield entire_rows(batch, field)


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

    Text that is not UTF-8 stays bytes, and is later counted as bad input.
    """
    converted = []
    for row in rows:
        text = find_text(row, field)[1]
        row = json_values(row)
        if isinstance(text, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                text = text.decode()
            row = replace_text(row, field, text)
        converted.append(row)
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


def _column_values(column: Any) -> list:
    import pyarrow as pa

    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # some value is not UTF-8: return all values as bytes
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return _as_bytes(column).to_pylist()


def _as_bytes(column: Any) -> Any:
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


def parquet_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that pyarrow raises for damaged files, which include built-in
    exceptions.
    """
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, NotImplementedError, OverflowError)
