"""Reads Arrow files, either streams (as written by `datasets`) or Feather, by batch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import END, Input, InputRange, problem_chunk, stored_in
from data_prep.files.parse import parse_rows
from data_prep.files.streams import Failure
from data_prep.formats.arrow_values import (
    MAX_ROWS,
    arrow_errors,
    as_bytes,
    column_problem,
    column_values,
    entire_rows,
    is_text_type,
)
from data_prep.formats.format import Format
from zerolm.common.errors import reason


def _check(source: Input, text_field: str) -> Input:
    try:
        failure = column_problem(_open(stored_in(source))[0], text_field)
    except arrow_errors() as error:
        failure = _failure(error)
    return replace(source, problem=failure)


def _failure(error: BaseException) -> Failure:
    problem = f"cannot be read as Arrow ({reason(error, named=False)})"
    return Failure("damaged", f"{problem}. Restore the file, or remove it.")


def _open(stored: Any) -> tuple[Any, Iterator[Any]]:
    """Open a file; return its schema and its batches.

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
            yield column_values(rows.column(rules.text_field))
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
        (as_bytes(column) if is_text_type(column.type) else column).validate(full=True)


def _read(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    """Read one batch at a time; if a batch is damaged, the rest of the file is lost."""
    stored_bytes, row, done = source.size_bytes or 0, 0, part.start
    try:
        stored = stored_in(source)
        for batch in _open(stored)[1]:
            skip = min(len(batch), max(0, part.start - row))
            row += len(batch)
            for values in read_batch(batch, skip, rules, chunk_bytes) if skip < len(batch) else ():
                chunk = Chunk(source.name, "rows", done, values, 0, part.input)
                done += len(values)
                yield chunk, done
    except arrow_errors() as error:
        yield problem_chunk(source, part, done, _failure(error), 1, stored_bytes, is_row=True), END
        return
    yield Chunk(source.name, "rows", done, [], stored_bytes, part.input), END


ARROW = Format((".arrow",), _read, parse_rows, places="row", check=_check)
