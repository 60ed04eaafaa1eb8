"""One input, from one place on, as chunks: text files, lines, Parquet, data sets of the hub.

What cannot be read becomes a chunk of kind "bad", and reading goes on behind it where it can.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.documents import Chunk, InputRules, Problem, too_long
from data_prep.streams import Failure, Stream, read_lines
from zerolm.errors import ConfigError, ZerolmError

HUB_ROWS = 64  # a batch of the streaming iterator
TABLE_ROWS = 8192
SHOWN_CHARACTERS = 200
END = -1  # as `next` of a chunk: nothing comes behind it


@dataclass(frozen=True)
class HubId:
    """A data set of the Hugging Face hub."""

    name: str  # what `datasets.load_dataset` takes
    config: str | None
    split: str
    revision: str | None = None  # the commit that every task reads


@dataclass(frozen=True)
class Input:
    """One file or hub data set. Tasks get it by value, so it holds nothing open."""

    argument: str  # the --input that named it
    name: str  # a path or a hub id
    suffix: str  # one of sources.SUFFIXES, or "hub"
    size_bytes: int | None
    modified_ns: int | None = None
    hub: HubId | None = None
    problem: Failure | None = None  # why nothing of it can be read, where bad input is skipped
    num_rows: int = 0  # that are lost with it, where that is known


def read_input(
    inputs: list[Input], number: int, start: int, stop: int | None, rules: InputRules, size: int
) -> Iterator[tuple[Chunk, int]]:
    """Yield (chunk, where the next one begins) of the documents that start in [start, stop).

    Args:
        number: of the input.
        start: a byte of the decompressed file, at or behind whose line start reading begins; a row
            of Parquet or the hub.
        size: of a chunk, in bytes.

    Raises:
        ConfigError: a file that has changed since it was listed.
        ZerolmError: a hub data set that stopped to answer.
    """
    each = inputs[number]
    if each.problem is not None:
        yield _bad(each, number, 0, each.problem, max(1, each.num_rows), each.size_bytes or 0), END
    elif each.suffix == "hub":
        yield from _read_hub(each, number, start, rules)
    elif (failure := check_unchanged(each)) is not None:
        yield _bad(each, number, 0, failure, 1, each.size_bytes or 0), END
    elif each.suffix == ".txt":
        yield from _read_text(each, number, rules)
    elif each.suffix == ".parquet":
        yield from _read_table(each, number, start, stop, rules, size)
    else:
        yield from _read_lines(each, number, start, stop, rules, size)


def check_unchanged(each: Input) -> Failure | None:
    """Return why a file can no longer be opened.

    Raises:
        ConfigError: it has another size than when it was listed.
    """
    path = Path(each.name)
    try:
        now = path.stat().st_size if path.is_file() else None
    except OSError as error:
        return Failure("unreadable", f"cannot be opened ({error.strerror}).")
    if now is None:
        return Failure("unreadable", "is no longer a file.")
    if each.size_bytes is not None and now != each.size_bytes:
        raise ConfigError(
            f"{each.name}: had {each.size_bytes:,} bytes when the command began, and has {now:,} "
            f"now. Run it again when nothing writes to the input any more."
        )
    return None


def _bad(
    each: Input, number: int, start: int, failure: Failure, count: int, lost_bytes: int
) -> Chunk:
    is_row = each.suffix in (".parquet", "hub")
    problem = Problem(
        failure.reason, each.name, number, start, is_row, failure.detail, count, lost_bytes
    )
    return Chunk(each.name, "bad", start, problem, 0, number)


def _read_text(each: Input, number: int, rules: InputRules) -> Iterator[tuple[Chunk, int]]:
    size = each.size_bytes or 0
    if size > rules.max_document_bytes:
        chunk = Chunk(each.name, "bad", 0, b"", size, number)
        yield chunk._replace(data=too_long(chunk, 0, size, rules.max_document_bytes)), END
        return
    stream = Stream(each.name, each.suffix, 0, rules.max_expansion)
    data = b"".join(stream)
    if stream.failure is not None:
        yield _bad(each, number, 0, stream.failure, 1, size), END
    else:
        yield Chunk(each.name, "text", 0, data, size, number), END


def _read_lines(
    each: Input, number: int, start: int, stop: int | None, rules: InputRules, size: int
) -> Iterator[tuple[Chunk, int]]:
    stream = Stream(each.name, each.suffix, max(0, start - 1), rules.max_expansion)
    limit = rules.max_document_bytes
    compressed = each.suffix.endswith((".gz", ".zst"))
    done, last = None, start
    for lines in read_lines(stream, start, stop, size, limit):
        if done is None:
            done = stream.skipped_bytes if compressed else lines.start
        here = lines.read_bytes if compressed else lines.stop
        chunk = Chunk(each.name, "lines", lines.start, lines.data, here - done, number)
        if not lines.data:
            problem = too_long(chunk, lines.start, lines.stop - lines.start, limit)
            chunk = chunk._replace(kind="bad", data=problem)
        done, last = here, lines.stop
        yield chunk, last
    if stream.failure is not None:
        lost = max(0, (each.size_bytes or 0) - (done or 0))
        yield _bad(each, number, last, stream.failure, 1, lost), END


def _read_table(
    each: Input, number: int, start: int, stop: int | None, rules: InputRules, size: int
) -> Iterator[tuple[Chunk, int]]:
    """Read row groups one after the other: a damaged one does not lose those behind it."""
    import pyarrow.parquet as pq

    stored_bytes = each.size_bytes or 0
    try:
        file = pq.ParquetFile(each.name, buffer_size=1 << 20, page_checksum_verification=True)
    except reading_errors() as error:
        yield _bad(each, number, start, _table_failure(error), 1, stored_bytes), END
        return
    with file:
        num_rows = file.metadata.num_rows
        end = 0
        for group in range(file.metadata.num_row_groups):
            begin, end = end, end + file.metadata.row_group(group).num_rows
            if end <= start or (stop is not None and begin >= stop):
                continue
            at = max(begin, start)
            try:
                for values in _group_values(file, group, at - begin, rules, size):
                    share = stored_bytes * (at + len(values)) // num_rows
                    share -= stored_bytes * at // num_rows
                    chunk = Chunk(each.name, "rows", at, values, share, number)
                    at += len(values)
                    yield chunk, at
                if at != end:
                    raise ValueError(f"{end - at} rows of its row group {group} are missing")
            except reading_errors() as error:
                lost = stored_bytes * (end - at) // max(1, num_rows)
                failure = error.failure if isinstance(error, _Refused) else _table_failure(error)
                yield _bad(each, number, at, failure, end - at, lost), end


class _Refused(ValueError):
    def __init__(self, failure: Failure):
        super().__init__(failure.detail)
        self.failure = failure


def _group_values(file: Any, group: int, skip: int, rules: InputRules, size: int) -> Iterator[list]:
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
        raise _Refused(
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
            yield _json_values(batch.to_pylist())


def _json_values(value: Any) -> Any:
    """Return rows as JSON has them: times in ISO 8601, bytes in base64, decimals as text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _json_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(inner) for inner in value]
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


def _table_failure(error: BaseException) -> Failure:
    reason = " ".join(str(error).split())[:SHOWN_CHARACTERS] or type(error).__name__
    return Failure(
        "damaged", f"cannot be read as Parquet ({reason}). Restore the file, or remove it."
    )


@lru_cache(maxsize=16)
def open_hub(hub: HubId) -> Any:
    """Open a data set for streaming."""
    import datasets

    return datasets.load_dataset(
        hub.name, hub.config, split=hub.split, revision=hub.revision, streaming=True
    )


def _read_hub(
    each: Input, number: int, start: int, rules: InputRules
) -> Iterator[tuple[Chunk, int]]:
    assert each.hub is not None
    done = start
    batches = None
    while True:
        try:
            if batches is None:
                batches = iter(open_hub(each.hub).skip(start).iter(batch_size=HUB_ROWS))
            batch = next(batches, None)
        except Exception as error:  # the network, or a damaged file behind it
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ZerolmError(
                f"{each.name}: reading stopped after row {done} ({reason})."
            ) from error
        if batch is None:
            return
        rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        head = rules.text_field.partition(".")[0]
        if rules.text_field not in batch and head not in batch:
            raise ConfigError(
                f"{each.name}:{done + 1}: no column {rules.text_field!r}; it has "
                f"{', '.join(batch)}. Choose one with --text_field."
            )
        if rules.keep_records:
            rows = _json_values(rows)
        elif rules.text_field in batch:
            rows = batch[rules.text_field]
        yield Chunk(each.name, "rows", done, rows, 0, number), done + len(rows)
        done += len(rows)
