"""One input, from one place on, as chunks: text files, lines, Parquet, data sets of the hub.

What cannot be read becomes a chunk of kind "bad", and reading goes on behind it where it can.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.documents import Chunk, InputRules, Problem, too_long
from data_prep.streams import Failure, Stream, read_lines
from data_prep.tables import Refused, group_values, json_values, reading_errors
from zerolm.errors import ConfigError, ZerolmError

HUB_ROWS = 64  # a batch of the streaming iterator
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
    of_stage: bool = False  # whether a stage wrote it: what it holds was let in already


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
                for values in group_values(file, group, at - begin, rules, size):
                    share = stored_bytes * (at + len(values)) // num_rows
                    share -= stored_bytes * at // num_rows
                    chunk = Chunk(each.name, "rows", at, values, share, number)
                    at += len(values)
                    yield chunk, at
                if at != end:
                    raise ValueError(f"{end - at} rows of its row group {group} are missing")
            except reading_errors() as error:
                lost = stored_bytes * (end - at) // max(1, num_rows)
                failure = error.failure if isinstance(error, Refused) else _table_failure(error)
                yield _bad(each, number, at, failure, end - at, lost), end


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
            rows = json_values(rows)
        elif rules.text_field in batch:
            rows = batch[rules.text_field]
        yield Chunk(each.name, "rows", done, rows, 0, number), done + len(rows)
        done += len(rows)
