"""Writes finished token shards in another format: a new directory, which appears when complete.

Beside the files of the format it has `_provenance.json` and a copy of the tokenizer, whose names
readers of directories skip. Independent of the formats.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.finished_shards.documents import Documents, Inputs, read_documents
from data_prep.finished_shards.items import Content
from data_prep.finished_shards.output import parent_entry
from data_prep.tasks.progress import Progress
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.common.files import file_entry, make_directories, sync_directory, sync_tree, write_json
from zerolm.common.locks import FileLock, LockTaken
from zerolm.shards.reader import Source

PROVENANCE, TOKENIZER = "_provenance.json", "_tokenizer"


def output_problems(directory: Path) -> list[str]:
    """Return why a new directory cannot be written."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        return [f"--output {directory}: exists already. Choose another directory, or remove it."]
    existing = directory.absolute().parent
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [f"--output {directory}: {existing} is not a directory that can be written."]
    return []


def differences(sources: Sequence[Source]) -> list[str]:
    """Return why sources cannot be converted together, a line for each difference."""
    problems = []
    first = sources[0]
    for other in sources[1:]:
        for key, fix in (
            ("fingerprint", "Tokenize one of them again."),
            ("vocab_size", "Tokenize one of them again."),
            ("eos_id", "Tokenize one of them again."),
            ("dtype", "Convert each by itself."),
        ):
            one, two = (
                each.head["tokenizer"][key] if key == "fingerprint" else each.head[key]
                for each in (first, other)
            )
            if one != two:
                name = "tokenizer.fingerprint" if key == "fingerprint" else key
                problems.append(
                    f"{other.directory}: {name} is {two}, but {one} in {first.directory}. {fix}"
                )
        one, two = (each.head.get("split", {}).get("part") for each in (first, other))
        if {one, two} == {"training", "validation"}:
            problems.append(
                f"{other.directory}: holds {two} documents, and {first.directory} {one} documents, "
                f"which would be mixed. Convert those of each part by themselves."
            )
    return problems


def convert(
    sources: Sequence[Source],
    write: Callable[[Path, Content], None],
    directory: Path,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """Write all documents of sources in another format; return what `_provenance.json` has.

    Args:
        sources: token shards with equal tokenizers.
    """
    unfinished = directory.absolute().parent / f".{directory.name}.unfinished"
    try:
        make_directories(unfinished)
        lock = FileLock(unfinished / ".lock")
    except LockTaken:
        raise ConfigError(f"{directory}: another process is writing it now. Wait for it.") from None
    except OSError as error:
        raise ZerolmError(f"{unfinished}: cannot be made ({error.strerror}).") from error
    with lock:
        try:
            for path in unfinished.iterdir():  # of a command that was killed
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != ".lock":
                    path.unlink()
            record = _write(sources, write, unfinished, provenance)
            (unfinished / ".lock").unlink()
            unfinished.rename(directory)
            sync_directory(directory.absolute().parent)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not isinstance(error, OSError) or isinstance(error, PermissionError):
                raise
            raise ZerolmError(
                f"{error.filename or directory}: cannot be written ({error.strerror or error}). "
                f"Nothing is left of it; correct that and start again."
            ) from error
    return record


def _write(
    sources: Sequence[Source],
    write: Callable[[Path, Content], None],
    directory: Path,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    source, counts = sources[0], {"num_documents": 0, "num_tokens": 0}
    num_tokens = sum(each.num_tokens for each in sources)
    progress = Progress("convert", num_tokens * source.dtype.itemsize)
    inputs = Inputs(sources)

    def documents() -> Iterator[Documents]:
        for piece in read_documents(sources, inputs):
            yield piece
            counts["num_documents"] += len(piece.ends)
            counts["num_tokens"] += len(piece.ids)
            progress.add(piece.ids.nbytes, len(piece.ends), len(piece.ids))

    def ends() -> Iterator[np.ndarray]:
        for each in sources:
            for shard in range(len(each.shards)):
                yield each.document_ends(shard).astype(np.int64)

    content = Content(
        documents,
        ends,
        sum(each.num_documents for each in sources),
        num_tokens,
        source.dtype,
        source.head.get("split", {}).get("part") == "validation",
    )
    try:
        write(directory, content)
    finally:
        progress.close()
    expected = {"num_documents": content.num_documents, "num_tokens": content.num_tokens}
    assert counts == expected, "documents were lost"
    copy = source.tokenizer_directory()
    if copy.is_dir():
        shutil.copytree(copy, directory / TOKENIZER, copy_function=shutil.copyfile)
    sync_tree(directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    record = {
        **counts,
        "vocab_size": source.vocab_size,
        "eos_id": source.eos_id,
        "tokenizer": source.head["tokenizer"],
        "files": [file_entry(path, directory) for path in files],
        "parents": [parent_entry(each) for each in sources],
        **provenance,
    }
    write_json(directory / PROVENANCE, record)
    return record
