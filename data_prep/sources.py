"""Inputs: which files or hub data sets are meant, and reading them in order, in bounded memory.

Local files are read directly, and hub data sets through `datasets` streaming. docs/formats.md says
why: direct reading is faster, and it can name the line of a broken document.
Knows nothing of tokenizers and shards.
"""

import glob
import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.documents import Chunk
from zerolm.errors import ConfigError, ZerolmError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
HUB_ID = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.+-]+))?"
)
HUB_ROWS = 64  # a batch of the streaming iterator


@dataclass(frozen=True)
class Input:
    """One file or hub data set."""

    argument: str  # the --input that named it
    name: str  # a path or a hub id
    suffix: str  # one of SUFFIXES, or "hub"
    size_bytes: int | None
    data: Any = None  # the opened data set of a hub id


def find_inputs(arguments: Sequence[str], text_field: str) -> tuple[list[Input], list[str]]:
    """Return the inputs in reading order, and notes on what was left aside.

    An argument is a file, a directory (all below it, sorted by path), a glob (sorted; `**` goes
    down directories), or a hub id `namespace/name[:config][@split]` that is no local path.

    Raises:
        ConfigError: every argument and file that cannot be read, and each file that is named twice.
    """
    inputs: list[Input] = []
    notes: list[str] = []
    problems: list[str] = []
    for argument in arguments:
        inputs += _expand(argument, text_field, notes, problems)
    seen: dict[str, str] = {}
    for each in inputs:
        key = os.path.realpath(each.name) if each.suffix != "hub" else each.name
        if key in seen:
            problems.append(
                f"--input {each.argument}: {each.name} is named already by --input {seen[key]}. "
                f"Its documents would be there twice: remove one."
            )
        elif each.suffix == ".parquet":
            problems += _parquet_problems(each.name, text_field)
        seen.setdefault(key, each.argument)
    if problems:
        raise ConfigError(problems)
    return inputs, notes


def _expand(
    argument: str, text_field: str, notes: list[str], problems: list[str]
) -> Iterator[Input]:
    if os.path.lexists(argument):
        paths = [argument]
    elif glob.has_magic(argument):
        paths = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - absolute ones too
        if "**" in argument:  # it gives directories and what is in them
            paths = [path for path in paths if not Path(path).is_dir()]
        if not paths:
            problems.append(f"--input {argument}: the glob matches nothing. Check the path.")
    elif (match := HUB_ID.fullmatch(argument)) and _suffix(argument) is None:
        yield from _open_hub(argument, match, text_field, problems)
        return
    else:
        problems.append(
            f"--input {argument}: no such file or directory, and not a hub id "
            f"(namespace/name[:config][@split]). Check the path."
        )
        return
    for path in paths:
        if Path(path).is_dir():
            yield from _walk(argument, path, notes, problems)
        elif (suffix := _suffix(path)) is None:
            problems.append(
                f"--input {argument}: {path} is not one of {', '.join(SUFFIXES)}. "
                f"Convert or rename it."
            )
        elif not (Path(path).is_file() and os.access(path, os.R_OK)):
            problems.append(f"--input {argument}: {path} is not a readable file.")
        else:
            yield Input(argument, path, suffix, Path(path).stat().st_size)


def _walk(argument: str, top: str, notes: list[str], problems: list[str]) -> Iterator[Input]:
    """Yield the files below a directory, sorted by path."""
    paths: list[str] = []
    for directory, _, names in os.walk(top, onerror=lambda error: problems.append(f"{error}")):
        paths += [os.path.join(directory, name) for name in names]  # noqa: PTH118
    known = sorted(path for path in paths if _suffix(path) is not None)
    others = sorted(path for path in paths if _suffix(path) is None)
    if others:
        notes.append(
            f"--input {argument}: left aside {len(others):,} of {len(paths):,} files, which are "
            f"not {', '.join(SUFFIXES)}; the first is {others[0]}"
        )
    if not known:
        problems.append(f"--input {argument}: no {', '.join(SUFFIXES)} file below {top}.")
    for path in known:
        if Path(path).is_file() and os.access(path, os.R_OK):
            yield Input(argument, path, _suffix(path) or "", Path(path).stat().st_size)
        else:
            problems.append(f"--input {argument}: {path} is not a readable file.")


def _suffix(path: str) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.endswith(suffix)), None)


def _parquet_problems(path: str, text_field: str) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        return [f"{path}: cannot be read as Parquet ({error}). Restore or remove the file."]
    if text_field not in schema.names:
        return [
            f"{path}: no column {text_field!r}; it has {', '.join(schema.names)}. "
            f"Choose one with --text_field."
        ]
    kind = schema.field(text_field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return [f"{path}: column {text_field!r} has type {kind}, not string. Choose --text_field."]
    return []


def _open_hub(
    argument: str, match: re.Match[str], text_field: str, problems: list[str]
) -> Iterator[Input]:
    try:
        yield open_hub(argument, match["name"], match["config"], match["split"] or "train")
    except Exception as error:  # datasets, huggingface_hub and the network raise what they like
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        problems.append(
            f"--input {argument}: no such file, and it cannot be opened as a data set of the hub "
            f"({reason}). Check the path, or the id (namespace/name[:config][@split]) and the "
            f"network."
        )


def open_hub(argument: str, name: str, config: str | None, split: str) -> Input:
    """Open a data set for streaming; `name` is what `datasets.load_dataset` takes."""
    import datasets

    data = datasets.load_dataset(name, config, split=split, streaming=True)
    return Input(argument, argument, "hub", None, data)


def read_chunks(inputs: Sequence[Input], text_field: str, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield the content of all inputs in order, in chunks of about `chunk_bytes`.

    A chunk holds whole documents, so one long document makes a larger chunk.

    Raises:
        ConfigError: a file that ends in the middle of compressed data, or is damaged.
        ZerolmError: a hub data set that stopped to answer.
    """
    for each in inputs:
        if each.suffix == ".txt":
            with _refusing(each.name, 1):
                data = Path(each.name).read_bytes()
            yield Chunk(each.name, "text", 1, data, len(data))
        elif each.suffix == ".parquet":
            yield from _read_parquet(each, text_field, chunk_bytes)
        elif each.suffix == "hub":
            yield from _read_hub(each, text_field)
        else:
            yield from _read_lines(each, chunk_bytes)


@contextmanager
def _refusing(name: str, position: int, unit: str = "line") -> Iterator[None]:
    """Turn what reading raises into a refusal that names the file and how far it was read.

    gzip raises OSError, EOFError and zlib.error; pyarrow subclasses of OSError and ValueError.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{name}:{position}: cannot be read past this {unit} ({error}). The file is cut or "
            f"damaged: restore it, or remove it."
        ) from error


def _read_lines(each: Input, chunk_bytes: int) -> Iterator[Chunk]:
    position, line = 0, 1
    with _refusing(each.name, line):
        raw = open(each.name, "rb")
    with raw:
        file = _decompress(raw, each.suffix)
        rest: list[bytes] = []  # the beginning of a line whose end is not read yet
        while True:
            with _refusing(each.name, line):
                block = file.read(chunk_bytes)
            cut = block.rfind(b"\n") + 1
            if block and not cut:
                rest.append(block)
                continue
            data = b"".join([*rest, block[:cut]])
            rest = [block[cut:]] if cut < len(block) else []
            if data:
                now = raw.tell()
                yield Chunk(each.name, "lines", line, data, now - position)
                position, line = now, line + data.count(b"\n")
            if not block:
                return


def _decompress(raw: BinaryIO, suffix: str) -> Any:
    if suffix.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if suffix.endswith(".zst"):
        import pyarrow as pa

        return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
    return raw


def _read_parquet(each: Input, text_field: str, chunk_bytes: int) -> Iterator[Chunk]:
    import pyarrow.parquet as pq

    assert each.size_bytes is not None
    with _refusing(each.name, 1, "row"):
        file = pq.ParquetFile(each.name, buffer_size=1 << 20)
    with file:
        metadata = file.metadata
        column = file.schema_arrow.names.index(text_field)
        stored = sum(
            metadata.row_group(group).column(column).total_uncompressed_size
            for group in range(metadata.num_row_groups)
        )
        rows = min(max(1, chunk_bytes * metadata.num_rows // max(stored, 1)), 8192)
        done = 0
        batches = file.iter_batches(rows, columns=[text_field])
        while True:
            with _refusing(each.name, done + 1, "row"):
                batch = next(batches, None)
                if batch is None:
                    return
                values = batch.column(0).to_pylist()
            before = each.size_bytes * done // metadata.num_rows
            now = each.size_bytes * (done + len(values)) // metadata.num_rows
            yield Chunk(each.name, "rows", done + 1, values, now - before)
            done += len(values)


def _read_hub(each: Input, text_field: str) -> Iterator[Chunk]:
    done = 0
    batches = iter(each.data.iter(batch_size=HUB_ROWS))
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # the network, or a damaged file behind it
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ZerolmError(
                f"{each.name}: reading stopped after row {done} ({reason})."
            ) from error
        if batch is None:
            return
        if text_field not in batch:
            raise ConfigError(
                f"{each.name}:{done + 1}: no column {text_field!r}; it has {', '.join(batch)}. "
                f"Choose one with --text_field."
            )
        yield Chunk(each.name, "rows", done + 1, batch[text_field], 0)
        done += len(batch[text_field])
