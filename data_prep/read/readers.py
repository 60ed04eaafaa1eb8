"""Reads one input, a file of any format or a hub dataset, in chunks from a given position.

An unreadable part becomes a chunk of kind "bad", and reading continues after it if possible.
"""

import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.read.csv_rows import header_of, read_table
from data_prep.read.documents import Chunk, InputRules
from data_prep.read.encodings import AUTO, UTF8
from data_prep.read.inputs import (
    ARCHIVE_FORMATS,
    CODE,
    END,
    PAGE_FORMATS,
    TABLE_FORMATS,
    TEXT_FORMATS,
    HubDataset,
    Input,
    InputRange,
    pointer_failure,
    problem_chunk,
    state_of,
    stored_in,
    stream_of,
)
from data_prep.read.lines import read_line_blocks, read_plain_line_blocks
from data_prep.read.pages import MAX_PAGE_BYTES, Page
from data_prep.read.parquet import (
    RowGroupRefused,
    arrow_failure,
    check_arrow,
    check_parquet,
    json_rows,
    open_arrow,
    parquet_errors,
    read_batch,
    read_row_group,
)
from data_prep.read.parse import too_long_problem
from data_prep.read.remote import READ_AHEAD_BYTES, stat_file
from data_prep.read.source_code import header_license
from data_prep.read.stage_files import check_stage_file
from data_prep.read.streams import COMPRESSIONS, Failure
from data_prep.read.warc import read_archive
from zerolm.common.errors import ConfigError, ZerolmError, reason
from zerolm.common.url import is_url

HUB_ROWS = 64  # rows per batch from the streaming iterator
BINARY_BYTES = 8192  # a zero byte within the first bytes marks a source file as binary, as in git


def read_input(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    """Yield (chunk, start of the next chunk) for a part of an input.

    A line belongs to the part in which it starts.

    Raises:
        ConfigError: the file was changed after the command started, before or during reading.
    """
    yield from _read_input(source, part, rules, chunk_bytes)
    is_one_request = is_url(source.name) and (source.size_bytes or 0) <= READ_AHEAD_BYTES
    if source.suffix != "hub" and source.problem is None and not is_one_request:
        _check_unchanged(source)


def _read_input(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    size = source.size_bytes or 0
    if source.problem is not None:
        num_documents = max(1, source.num_rows)
        yield problem_chunk(source, part, 0, source.problem, num_documents, size), END
    elif source.suffix == "hub":
        yield from _read_hub(source, part, rules)
    elif (failure := _check_unchanged(source) or _remote_pointer(source)) is not None:
        yield problem_chunk(source, part, 0, failure, 1, size), END
    elif source.size_bytes == 0:
        yield Chunk(source.name, "skipped", 0, "no_bytes", 0, part.input), END
    elif source.suffix.startswith((*TEXT_FORMATS, *PAGE_FORMATS, CODE)):
        yield from _read_text(source, part, rules)
    elif source.suffix.startswith(ARCHIVE_FORMATS):
        yield from read_archive(source, part, rules, chunk_bytes)
    elif source.suffix.startswith(TABLE_FORMATS):
        yield from read_table(source, part, rules, chunk_bytes)
    elif source.suffix == ".parquet":
        yield from _read_parquet(source, part, rules, chunk_bytes)
    elif source.suffix == ".arrow":
        yield from _read_arrow(source, part, rules, chunk_bytes)
    else:
        yield from _read_lines(source, part, rules, chunk_bytes)


def _remote_pointer(source: Input) -> Failure | None:
    """Return a failure if a file in a store is only a pointer; discovery checks local files."""
    return pointer_failure(source.name, source.size_bytes) if is_url(source.name) else None


def require_unchanged(inputs: Iterable[Input]) -> None:
    """Check before publishing that no local file has changed since it was read.

    Raises:
        ConfigError: a file has changed.
    """
    for source in inputs:
        if source.suffix == "hub" or source.problem is not None or is_url(source.name):
            continue
        if (failure := _check_unchanged(source)) is not None:
            raise ConfigError(f"{source.name}: {failure.detail} Restore it.")


def _check_unchanged(source: Input) -> Failure | None:
    """Raise an error if a file has changed; return a failure if it can no longer be opened."""
    again = "Run the command again when no process writes to the input."
    if is_url(source.name):
        if stat_file(source.name)[1:] != (source.size_bytes, source.version):
            raise ConfigError(f"{source.name}: has changed since the command started. {again}")
        return None
    try:
        status = Path(source.name).stat()
    except OSError as error:
        return Failure("unreadable", f"cannot be opened ({error.strerror}).")
    if not stat.S_ISREG(status.st_mode):
        return Failure("unreadable", "is no longer a file.")
    if source.size_bytes is not None and status.st_size != source.size_bytes:
        raise ConfigError(
            f"{source.name}: had {source.size_bytes:,} bytes when the command started, but has "
            f"{status.st_size:,} now. {again}"
        )
    state = state_of(status)
    seen = state if source.state is None else source.state
    # Some file systems number inodes differently on each host.
    is_other = state[2] == seen[2] and state[1] != seen[1]
    if source.modified_ns not in (None, status.st_mtime_ns) or state[0] != seen[0] or is_other:
        raise ConfigError(
            f"{source.name}: was written to or replaced since the command started, with the same "
            f"size. {again}"
        )
    return None


def checked_table(source: Input, text_field: str) -> Input:
    """Return a Parquet, Arrow or CSV file with `problem` set if the file has no text column."""
    if source.suffix.startswith(TABLE_FORMATS):
        return replace(source, problem=header_of(source, InputRules(text_field))[1])
    stored = stored_in(source)
    if source.suffix == ".arrow":
        return replace(source, problem=check_arrow(stored, text_field))
    failure, num_rows = check_parquet(stored, text_field)
    return replace(source, problem=failure, num_rows=num_rows if failure else 0)


def _read_text(source: Input, part: InputRange, rules: InputRules) -> Iterator[tuple[Chunk, int]]:
    """Read a file as one document."""
    size = source.size_bytes or 0
    is_page = source.suffix.startswith(PAGE_FORMATS)
    limit = min(rules.max_document_bytes, MAX_PAGE_BYTES) if is_page else rules.max_document_bytes
    stream = stream_of(source, 0, rules)
    is_too_long = not source.suffix.endswith(COMPRESSIONS) and size > limit
    blocks, text_bytes = [], size if is_too_long else 0
    for block in stream if not is_too_long else ():
        text_bytes += len(block)
        if text_bytes <= limit:
            blocks.append(block)
    if stream.failure is not None:
        yield problem_chunk(source, part, 0, stream.failure, 1, size), END
        return
    data, keys = b"".join(blocks), dict(source.keys)
    chunk = Chunk(source.name, "text", 0, data, size, part.input, encoding=stream.encoding)
    if text_bytes > limit:
        chunk = chunk._replace(kind="bad", data=too_long_problem(chunk, 0, text_bytes, limit))
    elif is_page:
        declared = "" if source.encoding in (UTF8, AUTO) else f"charset={source.encoding}"
        chunk = chunk._replace(kind="pages", data=[Page(0, data, f"text/html; {declared}")])
    elif source.suffix == CODE and b"\0" in data[:BINARY_BYTES]:
        chunk = chunk._replace(kind="skipped", data="binary")
    elif source.suffix == CODE:
        keys |= header_license(data)
    yield chunk._replace(keys=tuple(keys.items())), END


def _read_lines(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    if source.of_stage and not part.start:
        check_stage_file(Path(source.name))
    stream = stream_of(source, max(0, part.start - 1), rules)
    limit = rules.max_document_bytes
    is_compressed = source.encoding != UTF8 or source.suffix.endswith(COMPRESSIONS)
    counted, next_start = None, part.start  # `counted`: stored bytes in earlier chunks
    is_plain = not is_compressed and not is_url(source.name)
    blocks = read_plain_line_blocks if is_plain else read_line_blocks
    for block in blocks(stream, part.start, part.stop, chunk_bytes, limit):
        if counted is None:
            counted = stream.skipped_bytes if is_compressed else block.start
        read = block.read_bytes if is_compressed else block.stop
        chunk = Chunk(source.name, "lines", block.start, block.data, read - counted, part.input)
        chunk = chunk._replace(encoding=stream.encoding)
        if not block.data:
            problem = too_long_problem(chunk, block.start, block.stop - block.start, limit)
            chunk = chunk._replace(kind="bad", data=problem)
        counted, next_start = read, block.stop
        yield chunk, next_start
    if stream.failure is not None:
        lost = max(0, (source.size_bytes or 0) - (counted or 0))
        yield problem_chunk(source, part, next_start, stream.failure, 1, lost), END


def _read_parquet(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    """Read one row group at a time, so that a damaged row group does not affect later ones."""
    import pyarrow.parquet as pq

    stored_bytes = source.size_bytes or 0
    try:
        stored = stored_in(source)
        file = pq.ParquetFile(stored, buffer_size=1 << 20, page_checksum_verification=True)
    except parquet_errors() as error:
        failure = _parquet_failure(error)
        yield problem_chunk(source, part, part.start, failure, 1, stored_bytes), END
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
            except parquet_errors() as error:
                lost_rows = group_stop - row
                lost_bytes = stored_bytes * lost_rows // max(1, num_rows)
                failure = _parquet_failure(error)
                bad = problem_chunk(source, part, row, failure, lost_rows, lost_bytes)
                yield bad, group_stop


def _read_arrow(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    """Read one batch at a time; if a batch is damaged, the rest of the file is lost."""
    stored_bytes, row, done = source.size_bytes or 0, 0, part.start
    try:
        stored = stored_in(source)
        for batch in open_arrow(stored)[1]:
            skip = min(len(batch), max(0, part.start - row))
            row += len(batch)
            for values in read_batch(batch, skip, rules, chunk_bytes) if skip < len(batch) else ():
                chunk = Chunk(source.name, "rows", done, values, 0, part.input)
                done += len(values)
                yield chunk, done
    except parquet_errors() as error:
        yield problem_chunk(source, part, done, arrow_failure(error), 1, stored_bytes), END
        return
    yield Chunk(source.name, "rows", done, [], stored_bytes, part.input), END


def _parquet_failure(error: BaseException) -> Failure:
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


@lru_cache(maxsize=16)
def open_hub(hub: HubDataset) -> Any:
    """Open a dataset for streaming."""
    import datasets

    return datasets.load_dataset(
        hub.name, hub.config, split=hub.split, revision=hub.revision, streaming=True
    )


def _read_hub(source: Input, part: InputRange, rules: InputRules) -> Iterator[tuple[Chunk, int]]:
    assert source.hub is not None
    row = part.start
    batches = None
    while True:
        try:
            if batches is None:
                batches = iter(open_hub(source.hub).skip(part.start).iter(batch_size=HUB_ROWS))
            batch = next(batches, None)
        except Exception as error:  # from the network, or from a damaged file on the hub
            raise ZerolmError(
                f"{source.name}: reading stopped after row {row} ({reason(error)}). Check the "
                f"network and run the command again."
            ) from error
        if batch is None:
            return
        columns = zip(*batch.values(), strict=True)
        rows = [dict(zip(batch, values, strict=True)) for values in columns]
        head = rules.text_field.partition(".")[0]
        if rules.text_field not in batch and head not in batch:
            raise ConfigError(
                f"{source.name}:{row + 1}: no column {rules.text_field!r}; it has "
                f"{', '.join(batch)}. Choose a column with --text_field."
            )
        if rules.keep_records:
            rows = json_rows(rows, rules.text_field)
        elif rules.text_field in batch:
            rows = batch[rules.text_field]
        yield Chunk(source.name, "rows", row, rows, 0, part.input), row + len(rows)
        row += len(rows)
