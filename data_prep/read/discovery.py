"""Inputs: which files or hub data sets the --input flags mean, and in which order.

Local files are read directly, and hub data sets through `datasets` streaming. docs/formats.md says
why: direct reading is faster, and it can name the line of a broken document. `units` reads them.
Knows nothing of tokenizers and shards.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data_prep.readers import HubId, Input, open_hub
from data_prep.stage_files import STAGE, is_stage, is_unfinished, read_stage
from data_prep.streams import Failure
from data_prep.tables import reading_errors
from zerolm.errors import ConfigError

SUFFIXES = (*(".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet"),)
HUB_ID = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.+-]+))?"
)


def find_inputs(
    arguments: Sequence[str], text_field: str, skip_bad: bool = False
) -> tuple[list[Input], list[str]]:
    """Return the inputs in reading order, and notes on what was left aside.

    An argument is a file, a directory (all below it, sorted by path), a glob (sorted; `**` goes
    down directories), or a hub id `namespace/name[:config][@split]` that is no local path.

    Args:
        skip_bad: whether a file that cannot be read is returned with its `problem`, for its task to
            count, instead of refused.

    Raises:
        ConfigError: every argument that means nothing, each file that is named twice, and without
            `skip_bad` every file that cannot be read.
    """
    found: list[Input] = []
    notes: list[str] = []
    problems: list[str] = []
    for argument in arguments:
        found += _expand(argument, notes, problems)
    inputs: list[Input] = []
    seen: dict[str, str] = {}
    for each in found:
        key = os.path.realpath(each.name) if each.suffix != "hub" else each.name
        if key in seen:
            problems.append(
                f"--input {each.argument}: {each.name} is named already by --input {seen[key]}. "
                f"Its documents would be there twice: remove one."
            )
        elif each.suffix == ".parquet" and each.problem is None:
            each = _check_table(each, text_field)
        seen.setdefault(key, each.argument)
        if each.problem is not None and not skip_bad:
            given = f"--input {each.argument}: " if each.argument != each.name else ""
            problems.append(f"{given}{each.name}: {each.problem.detail}")
        inputs.append(each)
    if problems:
        raise ConfigError(problems)
    return inputs, notes


def _expand(argument: str, notes: list[str], problems: list[str]) -> Iterator[Input]:
    if os.path.lexists(argument):
        paths = [argument]
    elif glob.has_magic(argument):
        paths = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - absolute ones too
        if "**" in argument:  # it gives directories and what is in them
            paths = [path for path in paths if not Path(path).is_dir()]
        stages = [each for each in {os.path.dirname(p) for p in paths} if is_stage(each or ".")]  # noqa: PTH120
        if stages:
            problems.append(_several_stages(argument, stages))
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
        if Path(path, STAGE).is_file():
            yield from _stage(argument, path, problems)
        elif Path(path).is_dir():
            yield from _walk(argument, path, notes, problems)
        elif (suffix := _suffix(path)) is None:
            problems.append(
                f"--input {argument}: {path} is not one of {', '.join(SUFFIXES)}. "
                f"Convert or rename it."
            )
        else:
            yield _file(argument, path, suffix)


def _stage(argument: str, path: str, problems: list[str]) -> Iterator[Input]:
    """Yield the files of a stage, without what else lies in its directory."""
    try:
        files = read_stage(Path(path)).paths
    except ConfigError as error:
        problems += error.problems
        return
    for file in files:
        yield replace(_file(argument, str(file), _suffix(file.name) or ""), of_stage=True)


def _walk(argument: str, top: str, notes: list[str], problems: list[str]) -> Iterator[Input]:
    """Yield the files below a directory, sorted by path."""
    paths: list[str] = []
    links: list[str] = []
    stages: list[str] = []
    unreadable: dict[str, Failure] = {}

    def note(error: OSError) -> None:
        unreadable[str(error.filename)] = Failure(
            "unreadable", f"the directory cannot be read ({error.strerror}). Check its permissions."
        )

    for directory, directories, names in os.walk(top, onerror=note):
        if STAGE in names:
            stages.append(directory)
            directories.clear()
            continue
        if {"records", "work"} & set(directories) and is_unfinished(directory):
            problems.append(
                f"--input {argument}: {directory} is a stage that was not finished. Run its "
                f"command again, which goes on with it, or remove it."
            )
            directories.clear()
            continue
        paths += [os.path.join(directory, name) for name in names]  # noqa: PTH118
        below = [os.path.join(directory, name) for name in directories]  # noqa: PTH118
        links += [path for path in below if Path(path).is_symlink()]
    others = sorted(path for path in paths if _suffix(path) is None)
    known = sorted([path for path in paths if _suffix(path) is not None] + [*unreadable])
    if others:
        notes.append(
            f"--input {argument}: left aside {len(others):,} of {len(paths):,} files, which are "
            f"not {', '.join(SUFFIXES)}; the first is {others[0]}"
        )
    if links:
        notes.append(
            f"--input {argument}: left aside {len(links):,} directories that are symbolic links; "
            f"the first is {min(links)}. Give those that are meant as --input."
        )
    if stages:
        problems.append(_several_stages(argument, stages))
    elif not known:
        problems.append(f"--input {argument}: no {', '.join(SUFFIXES)} file below {top}.")
    for path in known if not stages else ():
        if path in unreadable:
            yield Input(argument, _shown(path), "directory", 0, problem=unreadable[path])
        else:
            yield _file(argument, path, _suffix(path) or "")


def _several_stages(argument: str, stages: Sequence[str]) -> str:
    """Say why files beside each other in stages are not read: the same documents are in several."""
    shown = ", ".join(sorted(stages)[:5]) + (", ..." if len(stages) > 5 else "")
    return (
        f"--input {argument}: means files of {len(stages):,} stages of a pipeline: {shown}. The "
        f"same documents are in several stages, and in the lists of what was dropped. Give the "
        f"directory of the stage that is meant."
    )


def _file(argument: str, path: str, suffix: str) -> Input:
    shown = _shown(path)
    if shown != path:  # manifests and records could not name it
        odd = Failure("unreadable", "has a name that is not UTF-8. Rename it.")
        return Input(argument, shown, suffix, 0, problem=odd)
    detail = None
    try:
        status = Path(path).stat()
        if not Path(path).is_file():  # a pipe, a socket or a device
            detail = "is not a readable file: it is neither a file nor a directory."
        elif not os.access(path, os.R_OK):
            detail = "is not a readable file. Check its permissions."
    except OSError as error:
        what = "a link to nothing" if Path(path).is_symlink() else error.strerror
        detail = f"is not a readable file ({what})."
    if detail is not None:
        return Input(argument, path, suffix, 0, problem=Failure("unreadable", detail))
    return Input(argument, path, suffix, status.st_size, status.st_mtime_ns)


def _shown(path: str) -> str:
    """Return a path as text: bytes that are not UTF-8, lone surrogates in Python, as `\\xe9`."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _suffix(path: str) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.endswith(suffix)), None)


def _check_table(each: Input, text_field: str) -> Input:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(each.name)
        schema = metadata.schema.to_arrow_schema()
    except reading_errors() as error:
        reason = " ".join(str(error).split())[:200]
        detail = f"cannot be read as Parquet ({reason}). Restore or remove the file."
        return replace(each, problem=Failure("damaged", detail))
    kind = _column_type(schema, text_field)
    failure = None
    if kind is None:
        failure = Failure(
            "no_text_field",
            f"no column {text_field!r}; it has {', '.join(schema.names)[:500]}. Choose one with "
            f"--text_field.",
        )
    elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        failure = Failure(
            "not_a_string",
            f"column {text_field!r} has type {kind}, not string. Choose --text_field.",
        )
    return replace(each, problem=failure, num_rows=metadata.num_rows if failure else 0)


def _column_type(schema: object, text_field: str) -> object | None:
    """Return the type of a column, or of a field in a column of objects; see find_text."""
    import pyarrow as pa

    assert isinstance(schema, pa.Schema | pa.StructType)
    parts = text_field.split(".")
    for count in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:count]), ".".join(parts[count:])
        names = schema.names if isinstance(schema, pa.Schema) else [each.name for each in schema]
        if head not in names:
            continue
        kind = schema.field(head).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not tail:
            return kind
        if pa.types.is_struct(kind) and (inner := _column_type(kind, tail)) is not None:
            return inner
    return None


def _find_hub(argument: str, match: re.Match[str], problems: list[str]) -> Iterator[Input]:
    name = match["name"]
    hub = HubId(name, match["config"], match["split"] or "train")
    try:
        from huggingface_hub import HfApi

        hub = replace(hub, revision=HfApi().dataset_info(name).sha)
        open_hub(hub)
        yield Input(argument, argument, "hub", None, hub=hub)
    except Exception as error:  # datasets, huggingface_hub and the network raise what they like
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        problems.append(
            f"--input {argument}: no such file, and it cannot be opened as a data set of the hub "
            f"({reason}). Check the path, or the id (namespace/name[:config][@split]) and the "
            f"network."
        )
