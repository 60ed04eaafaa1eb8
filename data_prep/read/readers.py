"""Reads one input, a file of any format or a hub dataset, in chunks from a given position.

An unreadable part becomes a chunk of kind "bad", and reading continues after it if possible.
"""

import stat
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import (
    END,
    HubDataset,
    Input,
    InputRange,
    pointer_failure,
    problem_chunk,
    state_of,
)
from data_prep.files.remote import READ_AHEAD_BYTES, stat_file
from data_prep.files.streams import Failure
from data_prep.formats import format_of
from data_prep.read.hub import read_hub
from data_prep.read.stage_files import check_stage_file
from zerolm.common.errors import ConfigError
from zerolm.common.url import is_url


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
    size, is_row = source.size_bytes or 0, format_of(source).places == "row"
    if source.problem is not None:
        num_documents = max(1, source.num_rows)
        yield problem_chunk(source, part, 0, source.problem, num_documents, size, is_row), END
    elif isinstance(source.hub, HubDataset):
        yield from read_hub(source, part, rules, partial(_read_hub_file, chunk_bytes=chunk_bytes))
    elif (failure := _check_unchanged(source) or _remote_pointer(source)) is not None:
        yield problem_chunk(source, part, 0, failure, 1, size, is_row), END
    elif source.size_bytes == 0:
        yield Chunk(source.name, "skipped", 0, "no_bytes", 0, part.input), END
    else:
        if source.of_stage and not part.start:
            check_stage_file(Path(source.name))
        yield from format_of(source).read(source, part, rules, chunk_bytes)


def _read_hub_file(
    file: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[Chunk]:
    file = format_of(file).check(file, rules.text_field) if file.size_bytes else file
    for chunk, _ in _read_input(file, part, rules, chunk_bytes):
        yield chunk


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
