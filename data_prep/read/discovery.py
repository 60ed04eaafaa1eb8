"""Resolves --input arguments to files and hub datasets, in reading order.

Local files are read directly, hub datasets through `datasets` streaming. Direct reading is faster
and can name the line of a broken document (docs/formats.md). Work units read the inputs.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data_prep.read.parquet import is_text_type, parquet_errors
from data_prep.read.readers import LINE_FORMATS, TEXT_FORMATS, HubDataset, Input, open_hub
from data_prep.read.stage_files import STAGE_MANIFEST, is_stage, is_unfinished, read_stage
from data_prep.read.streams import Failure
from zerolm.common.errors import ConfigError

COMPRESSED = (".json.gz", ".json.zst")  # JSON lines; an uncompressed .json is seldom that
SUFFIXES = tuple(
    [each + end for each in (*TEXT_FORMATS, *LINE_FORMATS) for end in ("", ".gz", ".zst")]
    + [*COMPRESSED, ".parquet"]
)
DATASET_CARD = "README.md"  # describes the files beside it
SHOWN_SUFFIXES = ".txt, .md, .jsonl, .ndjson (also .gz, .zst), .json.gz, .json.zst, .parquet"
HUB_ID = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.+-]+))?"
)


def find_inputs(
    arguments: Sequence[str], text_field: str, skip_bad: bool = False
) -> tuple[list[Input], list[str]]:
    """Return the inputs in reading order, and notes on ignored files and directories.

    An argument is a file, a directory (all files below it, sorted by path), a glob (sorted; `**`
    descends into directories), or a hub id `namespace/name[:config][@split]` that is not a local
    path.

    Args:
        skip_bad: return a file that cannot be read with its `problem`, so that its task counts it,
            instead of refusing it.

    Raises:
        ConfigError: arguments that match nothing, files that are named twice and, without
            `skip_bad`, files that cannot be read; all are listed.
    """
    candidates: list[Input] = []
    notes: list[str] = []
    problems: list[str] = []
    for argument in arguments:
        candidates += _expand(argument, notes, problems)
    inputs: list[Input] = []
    seen: dict[str, str] = {}
    for each in candidates:
        key = os.path.realpath(each.name) if each.suffix != "hub" else each.name
        if key in seen:
            problems.append(
                f"--input {each.argument}: {each.name} is already named by --input {seen[key]}. "
                f"Its documents would be read twice: remove one of them."
            )
        elif each.suffix == ".parquet" and each.problem is None:
            each = _check_parquet(each, text_field)
        seen.setdefault(key, each.argument)
        if each.problem is not None and not skip_bad:
            prefix = f"--input {each.argument}: " if each.argument != each.name else ""
            problems.append(f"{prefix}{each.name}: {each.problem.detail}")
        inputs.append(each)
    if problems:
        raise ConfigError(problems)
    return inputs, notes


def _expand(argument: str, notes: list[str], problems: list[str]) -> Iterator[Input]:
    """Yield the inputs of one argument."""
    if os.path.lexists(argument):
        paths = [argument]
    elif glob.has_magic(argument):
        paths = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - absolute ones too
        if "**" in argument:  # matches directories as well as the files in them
            paths = [path for path in paths if not Path(path).is_dir()]
        stages = [each for each in {os.path.dirname(p) for p in paths} if is_stage(each or ".")]  # noqa: PTH120
        if stages:
            problems.append(_stages_problem(argument, stages))
            return
        if not paths:
            problems.append(f"--input {argument}: the glob matches nothing. Check the path.")
    elif (match := HUB_ID.fullmatch(argument)) and _suffix(argument) is None:
        yield from _find_hub(argument, match, problems)
        return
    else:
        problems.append(
            f"--input {argument}: no such file or directory, and not a hub id "
            f"(namespace/name[:config][@split]). Check the path."
        )
        return
    for path in paths:
        if Path(path, STAGE_MANIFEST).is_file():
            yield from _stage_inputs(argument, path, problems)
        elif Path(path).is_dir():
            yield from _walk(argument, path, notes, problems)
        elif (suffix := _suffix(path)) is None:
            problems.append(
                f"--input {argument}: {path} is not one of {SHOWN_SUFFIXES}. Convert or rename it."
            )
        else:
            yield _file_input(argument, path, suffix)


def _stage_inputs(argument: str, path: str, problems: list[str]) -> Iterator[Input]:
    """Yield the files of a stage, and no other files of its directory."""
    try:
        files = read_stage(Path(path)).paths
    except ConfigError as error:
        problems += error.problems
        return
    for file in files:
        yield replace(_file_input(argument, str(file), _suffix(file.name) or ""), of_stage=True)


def _walk(argument: str, top: str, notes: list[str], problems: list[str]) -> Iterator[Input]:
    """Yield the files below a directory, sorted by path."""
    paths: list[str] = []
    hidden: list[str] = []
    links: list[str] = []
    stages: list[str] = []
    unreadable: dict[str, Failure] = {}

    def add_unreadable(error: OSError) -> None:
        unreadable[str(error.filename)] = Failure(
            "unreadable", f"the directory cannot be read ({error.strerror}). Check its permissions."
        )

    for directory, directories, names in os.walk(top, onerror=add_unreadable):
        if STAGE_MANIFEST in names:
            stages.append(directory)
            directories.clear()
            continue
        if {"records", "work"} & set(directories) and is_unfinished(directory):
            problems.append(
                f"--input {argument}: {directory} is an unfinished stage. Run its command again to "
                f"finish it, or remove it."
            )
            directories.clear()
            continue
        hidden += [f"{directory}/{name}" for name in (*names, *directories) if _is_hidden(name)]
        directories[:] = [name for name in directories if not _is_hidden(name)]
        names = [name for name in names if not _is_hidden(name)]
        paths += [os.path.join(directory, name) for name in names]  # noqa: PTH118
        children = [os.path.join(directory, name) for name in directories]  # noqa: PTH118
        links += [path for path in children if Path(path).is_symlink()]
    ignored = sorted(path for path in paths if _suffix(path) is None)
    known = sorted([path for path in paths if _suffix(path) is not None] + [*unreadable])
    if ignored:
        notes.append(
            f"--input {argument}: ignored {len(ignored):,} of {len(paths):,} files, which are "
            f"not {SHOWN_SUFFIXES}; the first is {ignored[0]}"
        )
    if hidden:
        notes.append(
            f"--input {argument}: ignored {len(hidden):,} hidden files, hidden directories "
            f"and {DATASET_CARD}; the first is {min(hidden)}. To read one of them, give it as "
            f"--input."
        )
    if links:
        notes.append(
            f"--input {argument}: ignored {len(links):,} directories that are symbolic links; "
            f"the first is {min(links)}. To read one of them, give it as --input."
        )
    if stages:
        problems.append(_stages_problem(argument, stages))
    elif not known:
        problems.append(f"--input {argument}: no {SHOWN_SUFFIXES} file below {top}.")
    for path in known if not stages else ():
        if path in unreadable:
            yield Input(argument, _printable(path), "directory", 0, problem=unreadable[path])
        else:
            yield _file_input(argument, path, _suffix(path) or "")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == DATASET_CARD


def _stages_problem(argument: str, stages: Sequence[str]) -> str:
    """Return the problem of a directory or glob that contains stages, which share documents."""
    shown = ", ".join(sorted(stages)[:5]) + (", ..." if len(stages) > 5 else "")
    return (
        f"--input {argument}: matches files of {len(stages):,} stages of a pipeline: {shown}. "
        f"Stages contain the same documents, as do their lists of dropped documents. Give the "
        f"directory of one stage."
    )


def _file_input(argument: str, path: str, suffix: str) -> Input:
    """Return the input of a file, with its `problem` if it cannot be read."""
    printable = _printable(path)
    if printable != path:  # manifests and records could not name it
        failure = Failure("unreadable", "has a name that is not UTF-8. Rename it.")
        return Input(argument, printable, suffix, 0, problem=failure)
    detail = None
    try:
        status = Path(path).stat()
        if not Path(path).is_file():  # a pipe, a socket or a device
            detail = "is not a readable file: it is neither a file nor a directory."
        elif not os.access(path, os.R_OK):
            detail = "is not a readable file. Check its permissions."
    except OSError as error:
        reason = "a broken link" if Path(path).is_symlink() else error.strerror
        detail = f"is not a readable file ({reason})."
    if detail is not None:
        return Input(argument, path, suffix, 0, problem=Failure("unreadable", detail))
    return Input(argument, path, suffix, status.st_size, status.st_mtime_ns)


def _printable(path: str) -> str:
    """Return a path with its bytes that are not UTF-8 escaped, as `\\xe9`."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _suffix(path: str) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.endswith(suffix)), None)


def _check_parquet(table: Input, text_field: str) -> Input:
    """Return a Parquet file with its `problem` if it has no column of text."""
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(table.name)
        schema = metadata.schema.to_arrow_schema()
    except parquet_errors() as error:
        reason = " ".join(str(error).split())[:200]
        detail = f"cannot be read as Parquet ({reason}). Restore or remove the file."
        return replace(table, problem=Failure("damaged", detail))
    column_type = _column_type(schema, text_field)
    failure = None
    if column_type is None:
        failure = Failure(
            "no_text_field",
            f"no column {text_field!r}; it has {', '.join(schema.names)[:500]}. Choose one with "
            f"--text_field.",
        )
    elif not is_text_type(column_type):
        failure = Failure(
            "not_a_string",
            f"column {text_field!r} has type {column_type}, not string. Choose another with "
            f"--text_field.",
        )
    return replace(table, problem=failure, num_rows=metadata.num_rows if failure else 0)


def _column_type(schema: object, text_field: str) -> object | None:
    """Return the type of a column, or of a field in a column of objects; as `find_text` does."""
    import pyarrow as pa

    assert isinstance(schema, pa.Schema | pa.StructType)
    parts = text_field.split(".")
    for count in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:count]), ".".join(parts[count:])
        names = schema.names if isinstance(schema, pa.Schema) else [each.name for each in schema]
        if head not in names:
            continue
        column_type = schema.field(head).type
        if pa.types.is_dictionary(column_type):
            column_type = column_type.value_type
        if not tail:
            return column_type
        if pa.types.is_struct(column_type):
            inner = _column_type(column_type, tail)
            if inner is not None:
                return inner
    return None


def _find_hub(argument: str, match: re.Match[str], problems: list[str]) -> Iterator[Input]:
    name = match["name"]
    hub = HubDataset(name, match["config"], match["split"] or "train")
    try:
        from huggingface_hub import HfApi

        hub = replace(hub, revision=HfApi().dataset_info(name).sha)
        open_hub(hub)
        yield Input(argument, argument, "hub", None, hub=hub)
    except Exception as error:  # datasets, huggingface_hub and the network raise many types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        problems.append(
            f"--input {argument}: no such file, and it cannot be opened as a hub dataset "
            f"({reason}). Check the path, or the id (namespace/name[:config][@split]) and the "
            f"network."
        )
