"""Reads Parquet files by row group, in lists of rows of bounded size."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import END, Input, InputRange, problem_chunk, stored_in
from data_prep.files.parse import parse_rows
from data_prep.files.streams import MIN_CHECKED_BYTES, Failure
from data_prep.formats.arrow_values import (
    MAX_ROWS,
    arrow_errors,
    column_problem,
    column_values,
    entire_rows,
)
from data_prep.formats.format import Format, Split
from data_prep.formats.json_columns import is_json_type
from zerolm.common.errors import reason


class RowGroupRefused(ValueError):
    """A row group was refused because its data expands too much when decompressed."""

    def __init__(self, failure: Failure):
        super().__init__(failure.detail)
        self.failure = failure


def _check(source: Input, text_field: str) -> Input:
    """Return a file with its problem, and then its number of rows."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(stored_in(source)) as file:
            num_rows, schema = file.metadata.num_rows, file.schema_arrow
    except arrow_errors() as error:
        detail = f"cannot be read as Parquet ({reason(error, named=False)})"
        return replace(source, problem=Failure("damaged", f"{detail}. Restore or remove the file."))
    problem = column_problem(schema, text_field)
    return replace(source, problem=problem, num_rows=num_rows if problem else 0)


def _read(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    """Read one row group at a time, so that a damaged row group does not affect later ones."""
    import pyarrow.parquet as pq

    stored_bytes = source.size_bytes or 0
    try:
        stored = stored_in(source)
        file = pq.ParquetFile(stored, buffer_size=1 << 20, page_checksum_verification=True)
    except arrow_errors() as error:
        failure = _failure(error)
        yield problem_chunk(source, part, part.start, failure, 1, stored_bytes, is_row=True), END
        return
    with file:
        num_rows = file.metadata.num_rows
        group_stop = 0
        for group in range(file.metadata.num_row_groups):
            group_start = group_stop
            group_stop += file.metadata.row_group(group).num_rows
            if group_stop <= part.start or (part.stop is not None and group_start >= part.stop):
                continue
            row = max(group_start, part.start)
            try:
                for values in read_row_group(file, group, row - group_start, rules, chunk_bytes):
                    share = stored_bytes * (row + len(values)) // num_rows
                    share -= stored_bytes * row // num_rows
                    chunk = Chunk(source.name, "rows", row, values, share, part.input)
                    row += len(values)
                    yield chunk, row
                if row != group_stop:
                    raise ValueError(f"{group_stop - row} rows of row group {group} are missing")
            except arrow_errors() as error:
                lost_rows = group_stop - row
                lost_bytes = stored_bytes * lost_rows // max(1, num_rows)
                failure = _failure(error)
                bad = problem_chunk(source, part, row, failure, lost_rows, lost_bytes, is_row=True)
                yield bad, group_stop


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
    names = None if rules.keep_records else [_json_head(file.schema_arrow, field) or field]
    is_text_column = names is not None and field in file.schema_arrow.names
    columns = [metadata.column(number) for number in range(metadata.num_columns)]
    if names is not None:
        columns = [
            column for column in columns if f"{column.path_in_schema}.".startswith(f"{names[0]}.")
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
            yield column_values(batch.column(0))
        else:
            yield entire_rows(batch, field)


def _json_head(schema: Any, field: str) -> str | None:
    """Return the JSON column in which a text field with dots is a path."""
    parts = [] if field in schema.names else field.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    is_json = lambda head: head in schema.names and is_json_type(schema.field(head).type)  # noqa: E731
    return next(filter(is_json, heads), None)


def _split(source: Input, limit: int) -> list[Split]:
    """Return ranges of row groups."""
    import pyarrow.parquet as pq

    stored_bytes = source.size_bytes or 0
    try:
        metadata = pq.read_metadata(stored_in(source))
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    except arrow_errors():  # the task that reads the file reports the problem
        return []
    parts: list[Split] = []
    start = stop = 0
    for group, count in enumerate(rows):
        stop += count
        size = stored_bytes * (stop - start) // max(1, sum(rows))
        following = rows[group + 1] if group + 1 < len(rows) else 0
        if not following or size * (stop - start + following) > limit * (stop - start):
            parts.append((start, stop, size))
            start = stop
    return parts


def _failure(error: BaseException) -> Failure:
    if isinstance(error, RowGroupRefused):
        return error.failure
    problem = f"cannot be read as Parquet ({reason(error, named=False)})"
    if "Invalid UTF8" in str(error):  # pyarrow checks the values of categorical columns
        fix = (
            "A categorical column contains text that is not UTF-8: write it as strings, or remove "
            "it"
        )
        return Failure("damaged", f"{problem}. {fix}.")
    return Failure("damaged", f"{problem}. Restore the file, or remove it.")


PARQUET = Format((".parquet",), _read, parse_rows, places="row", check=_check, split=_split)
