"""Resolves the values of --input to files and hub datasets, in reading order.

Work units read the inputs later: local files directly, hub datasets through `datasets` streaming.
Reading files directly is faster, and messages can name the line of a broken document
(docs/inputs.md).
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from data_prep.files.encodings import AUTO, canonical
from data_prep.files.inputs import (
    HubDataset,
    Input,
    pointer_failure,
    state_of,
)
from data_prep.files.remote import list_files
from data_prep.files.streams import COMPRESSIONS, Failure
from data_prep.formats import format_of, suffix_of
from data_prep.formats.format import package_versions
from data_prep.formats.hub_stream import open_hub
from data_prep.formats.json_lines import JSON_HINT, lines_suffix
from data_prep.formats.source_code import CODE, code_keys
from data_prep.read.directory_formats import (
    Found,
    describe,
    directory_problem,
    find_caches,
    find_format,
    find_in_listing,
    find_tables_of,
    without_caches,
)
from data_prep.read.file_kinds import CODE_FILES, DATA_FILES, DATASET_CARD, FileKinds
from data_prep.read.hub import hub_files
from data_prep.read.stage_files import (
    STAGE_MANIFEST,
    check_text_field,
    is_stage,
    read_stage,
    stage_of,
)
from zerolm.common.errors import ConfigError, reason
from zerolm.common.url import HUB_SECONDS, announce_hub, is_url

SHOWN_KINDS = 6
HUB_ID = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.+-]+))?"
)


def find_inputs(
    arguments: Sequence[str],
    text_field: str,
    skip_bad: bool = False,
    encoding: str = "utf-8",
    code: bool = False,
    text_fields: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Input], list[str]]:
    """Return the inputs in reading order, and notes on ignored files and directories.

    An argument is a file, a directory (all files below it, sorted by path), a glob (sorted; `**`
    descends into directories), a URL for any of these, or a hub id
    `namespace/name[:config][@split]` that is not a local path.

    Args:
        skip_bad: whether to return an unreadable file with its `problem` instead of raising an
            error; the task that reads the file then counts it as bad input.
        encoding: encoding of files that do not declare one, or "auto".
        code: whether to read each file as source code, whatever its format.
        text_fields: maps arguments to text fields that differ from `text_field`.

    Raises:
        ConfigError: lists all arguments that match nothing, files that are named twice and,
            without `skip_bad`, unreadable files.
    """
    candidates: list[Input] = []
    notes: list[str] = []
    problems: list[str] = []
    if code:
        try:
            package_versions(("identify", "ukkonen"))
        except ConfigError as error:
            raise ConfigError(f"--code: {error.problems[0]}") from None
    kinds = CODE_FILES if code else DATA_FILES
    for argument in arguments:
        field = text_fields.get(argument, text_field)
        num_before = len(problems)
        found = list(_expand(argument, field, kinds, notes, problems))
        candidates += (replace(each, text_field=text_fields.get(argument)) for each in found)
        if not code and len(problems) == num_before:
            tables = describe(find_tables_of(_directories(argument, found)))
            problems += (f"--input {argument}: {problem}" for problem in tables)
    if not code:
        files = (name for each in candidates for name in _files(each))
        problems += (f"--input {problem}" for problem in find_caches(files))
    inputs: list[Input] = []
    seen: dict[Any, str] = {}
    missing: dict[str, str] = {}  # each missing package is reported once, not for every file
    for each, key in _without_links(candidates, notes):
        if key in seen:
            problems.append(
                f"--input {each.argument}: {each.name} is already named by --input {seen[key]}. "
                f"Its documents would be read twice: remove one of them."
            )
        elif each.problem is None and not each.of_stage:
            each = _completed(each, each.text_field or text_field, encoding, missing)
        seen.setdefault(key, each.argument)
        if each.problem is not None and not skip_bad:
            prefix = f"--input {each.argument}: " if each.argument != each.name else ""
            problems.append(f"{prefix}{each.name}: {each.problem.detail}")
        inputs.append(each)
    notes += _copies_notes(inputs)
    problems += missing.values()
    if problems:
        raise ConfigError(problems)
    return inputs, notes


def _directories(argument: str, found: Sequence[Input]) -> set[str]:
    """Return the directory that an argument names, or those of the files that it names."""
    names = [name for each in found if not each.of_stage for name in _files(each)]
    is_below = names and names != [argument] and not glob.has_magic(argument)
    if is_below and not any(each.hub for each in found):
        return {argument.rstrip("/")}
    return {name.rpartition("/")[0] for name in names}


def _files(each: Input) -> list[str]:
    """Return the name of a file, or the names of the files of a hub dataset."""
    return [each.name] if each.hub is None else [file.name for file in hub_files(each.hub) or ()]


def _identity(each: Input) -> Any:
    """Return a key that is the same for all paths and links to the same file."""
    if each.suffix == "hub" or is_url(each.name):
        return each.name
    try:
        status = Path(each.name).stat()
    except OSError:
        return each.name
    if status.st_nlink > 1:  # on some file systems, all files have the same inode
        return status.st_dev, status.st_ino
    return os.path.realpath(each.name)


def _without_links(found: Sequence[Input], notes: list[str]) -> list[tuple[Input, Any]]:
    """Drop further links to files that the same argument already names; return (input, identity)
    pairs.
    """
    first: dict[Any, Input] = {}
    links: list[tuple[Input, Input]] = []
    kept: list[tuple[Input, Any]] = []
    for each in found:
        identity = _identity(each)
        known = first.setdefault((each.argument, identity), each)
        if known is each or each.name == each.argument:
            kept.append((each, identity))
        else:
            links.append((each, known))
    if links:
        link, known = links[0]
        notes.append(
            f"--input {link.argument}: ignored {len(links):,} more links to files that are "
            f"already read; the first is {link.name}, which is {known.name}"
        )
    return kept


def _copies_notes(inputs: Sequence[Input]) -> list[str]:
    """Return a note if files exist both compressed and uncompressed, or in two compressions."""
    first: dict[str, Input] = {}
    copies = []
    for each in inputs:
        end = next((end for end in COMPRESSIONS if each.suffix.endswith(end)), "")
        stem = each.name[: len(each.name) - len(end)]
        if stem in first:
            copies.append(f"{first[stem].name} and {each.name}")
        first.setdefault(stem, each)
    if not copies:
        return []
    return [
        f"{len(copies):,} file{'s exist' if len(copies) > 1 else ' exists'} in two compressions, "
        f"and both are read, for example {copies[0]}. Remove one if they have the same content."
    ]


def _completed(each: Input, text_field: str, encoding: str, missing: dict[str, str]) -> Input:
    """Set all fields of a file that affect reading, and `problem` if the file contains no text."""
    found = format_of(each)
    try:
        detected = ("chardet",) if encoding == AUTO and found.is_text else ()
        packages = package_versions(found.packages or detected)
    except ConfigError as error:
        problem = error.problems[0]
        missing.setdefault(problem, f"--input {each.argument}: {each.name} {problem}")
        return each
    keys: tuple[tuple[str, str], ...] = ()
    if found is CODE:
        is_tree = Path(each.argument).is_dir() or is_url(each.argument)
        keys = code_keys(each.name, each.argument if is_tree else str(Path(each.name).parent))
    if not is_url(each.name) and (failure := pointer_failure(each.name, each.size_bytes)):
        return replace(each, problem=failure)
    encoding = canonical(encoding) if found.is_text else "utf-8"
    each = replace(each, encoding=encoding, keys=keys, packages=packages)
    return found.check(each, text_field) if each.size_bytes else each


def _expand(
    argument: str, text_field: str, kinds: FileKinds, notes: list[str], problems: list[str]
) -> Iterator[Input]:
    """Yield the inputs that one argument names."""
    if is_url(argument):
        yield from _expand_url(argument, kinds, notes, problems)
        return
    if os.path.lexists(argument):
        paths = [argument]
    elif glob.has_magic(argument):
        paths = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - absolute ones too
        if "**" in argument:  # the glob matches both directories and the files in them
            paths = [path for path in paths if not Path(path).is_dir()]
        hidden = [path for path in paths if kinds.hides_below(argument, path)]
        paths = [path for path in paths if path not in set(hidden)]
        notes += _hidden_note(argument, hidden)
        stages = [each for each in {os.path.dirname(p) for p in paths} if is_stage(each or ".")]  # noqa: PTH120
        if stages:
            problems.append(_stages_problem(argument, stages))
            return
        if not paths:
            problems.append(f"--input {argument}: the glob matches nothing. Check the path.")
    elif (match := HUB_ID.fullmatch(argument)) and suffix_of(argument) is None:
        yield from _find_hub(argument, match, problems)
        return
    else:
        problems.append(
            f"--input {argument}: no such file or directory, and not a hub id "
            f"(namespace/name[:config][@split]). Check the path."
        )
        return
    for path in paths:
        try:
            stage = stage_of(path)
            # If the path is a directory with a stage's dropped documents, its parent is the stage.
            above = Path(path).parent
            written_by = read_stage(above) if Path(path).is_dir() and is_stage(above) else stage
            if written_by is not None:
                check_text_field(written_by, text_field)
        except ConfigError as error:
            problems += error.problems
            continue
        if stage is not None:
            is_one = stage.directory != Path(path)
            yield from _stage_inputs(argument, [Path(path)] if is_one else stage.paths)
        elif Path(path).is_dir():
            yield from _walk(argument, path, kinds, text_field, notes, problems)
        elif (suffix := _suffix(path, kinds, text_field)) is None:
            hint = f" {JSON_HINT}" if path.lower().endswith(".json") else ""
            problems.append(f"--input {argument}: {path} is not one of {kinds.shown}{hint}")
        else:
            yield _file_input(argument, path, suffix)


def _stage_inputs(argument: str, paths: Sequence[Path]) -> Iterator[Input]:
    """Yield the given files of a stage, ignoring other files in its directory."""
    for path in paths:
        yield replace(_file_input(argument, str(path), suffix_of(path.name) or ""), of_stage=True)


def _expand_url(
    argument: str, kinds: FileKinds, notes: list[str], problems: list[str]
) -> Iterator[Input]:
    """Yield the files that a URL names, with the same rules as for local paths."""
    try:
        entries = list_files(argument)
    except ConfigError as error:
        problems += error.problems
        return
    is_hidden = [kinds.hides_below(argument, each.url) for each in entries]
    suffixes = [kinds.suffix(each.url) for each in entries]
    if kinds is DATA_FILES:
        formats = describe(find_in_listing(argument, (each.url for each in entries)))
        if formats:
            problems += (f"--input {argument}: {problem}" for problem in formats)
            return
    stages = {each.url.rpartition("/")[0] for each in entries if each.url.endswith("/stage.json")}
    if stages:
        problems.append(_stages_problem(argument, list(stages)))
        return
    unread = [
        each.url
        for each, suffix, hidden in zip(entries, suffixes, is_hidden, strict=True)
        if hidden or suffix is None
    ]
    if len(unread) == len(entries):
        problems.append(f"--input {argument}: no file there is one of {kinds.shown}")
    elif unread:
        notes.append(
            f"--input {argument}: ignored {len(unread):,} of {len(entries):,} files, which are "
            f"hidden or not one of {kinds.shown}; the first is {unread[0]}"
        )
    for each, suffix, hidden in zip(entries, suffixes, is_hidden, strict=True):
        if suffix is not None and not hidden:
            yield Input(argument, each.url, suffix, each.size_bytes, version=each.version)


def _walk(
    argument: str,
    top: str,
    kinds: FileKinds,
    text_field: str,
    notes: list[str],
    problems: list[str],
) -> Iterator[Input]:
    """Yield the files below a directory, sorted by path."""
    paths: list[str] = []
    hidden: list[str] = []
    links: list[str] = []
    stages: list[str] = []
    formats: list[Found] = []
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
        if (problem := directory_problem(directory, directories, names)) is not None:
            problems.append(f"--input {argument}: {problem}")
            directories.clear()
            continue
        if kinds is DATA_FILES and (found := find_format(directory, directories, names)):
            formats.append(found)
            directories.clear()
            continue
        names = without_caches(directory, names)
        unseen = {name for name in (*names, *directories) if kinds.hides(name)}
        hidden += [f"{directory}/{name}" for name in unseen]
        directories[:] = [name for name in directories if name not in unseen]
        names = [name for name in names if name not in unseen]
        paths += [os.path.join(directory, name) for name in names]  # noqa: PTH118
        children = [os.path.join(directory, name) for name in directories]  # noqa: PTH118
        links += [path for path in children if Path(path).is_symlink()]
    suffixes = {path: _suffix(path, kinds, text_field) for path in paths}
    ignored = sorted(path for path, suffix in suffixes.items() if suffix is None)
    known = sorted([path for path, suffix in suffixes.items() if suffix] + [*unreadable])
    if ignored:
        notes.append(
            f"--input {argument}: ignored {len(ignored):,} of {len(paths):,} files "
            f"({_kinds(ignored)}), which are not {kinds.shown} The first is {ignored[0]}"
        )
    notes += _hidden_note(argument, hidden)
    notes += _hidden_note(argument, links, "directories that are symbolic links")
    problems += (f"--input {argument}: {problem}" for problem in describe(formats))
    if stages:
        problems.append(_stages_problem(argument, stages))
    elif not known and not formats:
        problems.append(f"--input {argument}: no file below {top} is one of {kinds.shown}")
    for path in known if not stages else ():
        if path in unreadable:
            yield Input(argument, _printable(path), "directory", 0, problem=unreadable[path])
        else:
            yield _file_input(argument, path, suffixes[path] or "")


HIDDEN = f"hidden files and directories (.name, _name), system files and {DATASET_CARD}"


def _hidden_note(argument: str, found: Sequence[str], what: str = HIDDEN) -> list[str]:
    if not found:
        return []
    return [
        f"--input {argument}: ignored {len(found):,} {what}; the first is {min(found)}. To read "
        f"one of them, give it as --input."
    ]


def _suffix(path: str, kinds: FileKinds, text_field: str) -> str | None:
    """Return the suffix that determines how a local file is read; None if it is not read."""
    suffix = kinds.suffix(path)
    if suffix is None and path.lower().endswith(".json"):
        return lines_suffix(path, text_field)
    return suffix


def _stages_problem(argument: str, stages: Sequence[str]) -> str:
    """Return the problem with a directory or glob that contains stages, whose documents overlap."""
    shown = ", ".join(sorted(stages)[:5]) + (", ..." if len(stages) > 5 else "")
    return (
        f"--input {argument}: matches files of {len(stages):,} stages of a pipeline: {shown}. "
        f"Stages contain the same documents, as do their lists of dropped documents. Give the "
        f"directory of one stage."
    )


def _file_input(argument: str, path: str, suffix: str) -> Input:
    """Return the input for a file, with its `problem` if the file cannot be read."""
    printable = _printable(path)
    if printable != path:  # the name is not valid in manifests, or could forge lines of output
        fact = (
            "a line break in its name" if {"\n", "\r"} & set(path) else "a name that is not UTF-8"
        )
        failure = Failure("unreadable", f"has {fact}. Rename it.")
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
    return Input(argument, path, suffix, status.st_size, status.st_mtime_ns, state_of(status))


def _printable(path: str) -> str:
    """Return a path with line breaks escaped, and bytes that are not UTF-8 (`\\xe9`)."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _kinds(paths: Sequence[str]) -> str:
    """Return the most frequent file name extensions, each with its count."""
    counts = Counter(Path(path).suffix or "no suffix" for path in paths)
    more = ", ..." if len(counts) > SHOWN_KINDS else ""
    return ", ".join(f"{n:,} {kind}" for kind, n in counts.most_common(SHOWN_KINDS)) + more


def _find_hub(argument: str, match: re.Match[str], problems: list[str]) -> Iterator[Input]:
    name = match["name"]
    hub = HubDataset(name, match["config"], match["split"] or "train")
    try:
        from huggingface_hub import HfApi

        announce_hub(argument)
        hub = replace(hub, revision=HfApi().dataset_info(name, timeout=HUB_SECONDS).sha)
        if hub_files(hub) is None:
            open_hub(hub)
        yield Input(argument, argument, "hub", None, hub=hub)
    except ConfigError as error:
        problems += (f"--input {argument}: {problem}" for problem in error.problems)
    except Exception as error:  # datasets and huggingface_hub raise errors of many types
        problems.append(
            f"--input {argument}: no such file, and it cannot be opened as a hub dataset "
            f"({reason(error)}). Check the path, or the id (namespace/name[:config][@split]) and "
            f"the network."
        )
