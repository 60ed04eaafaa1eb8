"""Reads a hub dataset: its data files like local files, and other kinds of files with `datasets`.

`datasets` infers the type of a column of JSON lines or CSV from its first rows, so a late number
changes the texts around it (docs/inputs.md). Readers of single formats are passed in.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import (
    HubDataset,
    Input,
    InputRange,
    state_of,
    stored_in,
)
from data_prep.files.parse import Parsed, parse_chunk
from data_prep.files.remote import stat_file
from data_prep.formats import format_of, suffix_of
from data_prep.formats.arrow_values import arrow_errors
from data_prep.formats.format import Parser
from data_prep.formats.hub_stream import HUB
from data_prep.formats.json_lines import JSON_LINES
from zerolm.common.errors import ConfigError, ZerolmError, reason
from zerolm.common.url import is_url

PLAIN_BUILDERS = ("json", "csv", "text", "parquet", "arrow")
OWN_KEYS = ("name", "version", "data_dir", "data_files", "description", "features")

ReadFile = Callable[[Input, InputRange, InputRules], Iterator[Chunk]]


@lru_cache(maxsize=16)
def hub_files(hub: HubDataset) -> list[Input] | None:
    """Return the data files of a split; None if only `datasets` can read their format.

    Raises:
        ConfigError: they cannot be read like local files, and `datasets` would change texts.
    """
    import datasets

    builder = datasets.load_dataset_builder(hub.name, hub.config, revision=hub.revision)
    config = builder.config
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in PLAIN_BUILDERS or not config.data_files:
        return None
    if hub.split not in config.data_files:
        splits = ", ".join(map(str, config.data_files))
        raise ConfigError(f"{hub.name}: no split {hub.split!r}; it has {splits}.")
    changed = [
        f"{key}={value!r}"
        for key, value in vars(config).items()
        if key not in OWN_KEYS and value != getattr(type(config)(), key)
    ]
    if changed:
        raise ConfigError(
            f"{hub.name}: its configuration sets {', '.join(changed)}, which files are not read "
            f"with here. Download the files, and convert them to JSON lines or Parquet."
        )
    return [_file(hub.name, str(path)) for path in config.data_files[hub.split]]


def _file(argument: str, name: str) -> Input:
    lines = JSON_LINES.endings[0] if name.lower().endswith(".json") else ""
    file = Input(argument, name, suffix_of(name) or lines, None)
    if not file.suffix or format_of(file).places == "byte":  # records are not rows
        raise ConfigError(
            f"{name}: is not read as it is. Download it, and unpack or convert it to JSON lines."
        )
    return file


def _with_state(file: Input) -> Input:
    """Return a file with its current state, which takes a request for each file of a hub."""
    if is_url(file.name):
        entry = stat_file(file.name)
        return replace(file, size_bytes=entry.size_bytes, version=entry.version)
    status = Path(file.name).stat()
    state = state_of(status)
    return replace(file, size_bytes=status.st_size, modified_ns=status.st_mtime_ns, state=state)


def read_hub(
    source: Input, part: InputRange, rules: InputRules, read_file: ReadFile
) -> Iterator[tuple[Chunk, int]]:
    """Yield (chunk, start of the next chunk); a start is a row, counted over all files.

    A line is a row, also a blank one, and so is a text file.
    """
    assert source.hub is not None
    try:
        files = hub_files(source.hub)
    except (ConfigError, ZerolmError):
        raise
    except Exception as error:  # from the network
        raise ZerolmError(
            f"{source.name}: its files cannot be listed ({reason(error)}). Check the network and "
            f"run the command again."
        ) from error
    if files is None:
        yield from HUB.read(source, part, rules, 0)
        return
    row = 0
    for file in files:
        first = row  # of the file
        file = _with_state(file)
        if part.start > row and (num_rows := _num_rows(file)) and row + num_rows <= part.start:
            row += num_rows
            continue
        parse = format_of(file).parse
        for chunk in read_file(file, InputRange(part.input), rules):
            starts = _row_starts(chunk)
            skip = max(0, min(part.start - row, len(starts)))
            row += len(starts)
            if skip < len(starts):
                chunk = _without_rows(chunk, starts, skip)
                number = row - len(starts) + skip
                parsed = _with_rows(chunk, rules, parse, starts[skip:], number, first)
                yield Chunk(source.name, "parsed", 0, parsed, 0, part.input), row


def _num_rows(file: Input) -> int | None:
    """Return the number of rows of a Parquet file; None for others, or if it is damaged."""
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        with contextlib.suppress(*arrow_errors()):
            return pq.read_metadata(stored_in(file)).num_rows
    return None


def _row_starts(chunk: Chunk) -> Sequence[int]:
    """Return where the rows of a chunk start: bytes or rows of the file."""
    if chunk.kind == "rows":
        return range(chunk.start, chunk.start + len(chunk.data))
    if chunk.kind == "fields":
        return [start for start, *_ in chunk.data[1]]
    if chunk.kind != "lines":
        return [chunk.start] * (chunk.data.num_documents if chunk.kind == "bad" else 1)
    starts, end = [chunk.start], chunk.data.find(b"\n") + 1
    while 0 < end < len(chunk.data):
        starts.append(chunk.start + end)
        end = chunk.data.find(b"\n", end) + 1
    return starts


def _without_rows(chunk: Chunk, starts: Sequence[int], skip: int) -> Chunk:
    if not skip or chunk.kind not in ("rows", "fields", "lines"):
        return chunk
    if chunk.kind == "fields":
        return chunk._replace(data=(chunk.data[0], chunk.data[1][skip:]))
    return chunk._replace(start=starts[skip], data=chunk.data[starts[skip] - chunk.start :])


def _with_rows(
    chunk: Chunk, rules: InputRules, parse: Parser, starts: Sequence[int], row: int, first: int
) -> Parsed:
    """Parse a chunk; number its documents over all files, and its problems within the file.

    Args:
        row: number of the chunk's first row.
        first: number of the file's first row.
    """
    documents, skipped, problems = parse_chunk(chunk, rules, parse)
    number = lambda start: row + max(0, bisect_right(starts, start) - 1)  # noqa: E731
    if chunk.kind == "bad":
        number = lambda start: row  # noqa: E731
    return (
        [document._replace(start=number(document.start)) for document in documents],
        skipped,
        [each._replace(start=number(each.start) - first, is_row=True) for each in problems],
    )
