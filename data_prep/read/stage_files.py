"""Reads and writes the files that stages exchange: clean -> dedup -> decontaminate -> tokenize.

A stage is a directory that contains one file per task: `00000.jsonl.zst`, ..., with the same names
in every stage. Each line is a JSON object with the text, an `id`, and the input's other keys.
`stage.json` is published last, with counts, options, the sizes and checksums of the files, and the
record of the previous stage. A directory without `stage.json` is not a stage. Independent of what
each stage does.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

from zerolm.common.errors import ConfigError, RecordError
from zerolm.common.files import sha256_file, sync_directory, sync_file, temporary_path, write_json
from zerolm.common.records import (
    Count,
    Name,
    digest_problem,
    mismatch,
    read_record,
    unreadable,
    with_digest,
)

STAGE_MANIFEST = "stage.json"
FORMAT, VERSION = "zerolm-stage", 1
STAGE_SUFFIX = ".jsonl.zst"
BLOCK_BYTES = 1 << 20
_TASK_FILE = re.compile(r"\d{5,}(_\d{5,})?\.jsonl\.zst|\w+\.jsonl\.zst\.[\w-]+\.tmp")

Json = dict[str, Any]


def stage_file(task: int, piece: int = 0) -> str:
    """Return the name of a task's file; `piece` is its index if the task writes several files."""
    return f"{task:05d}{f'_{piece:05d}' if piece else ''}{STAGE_SUFFIX}"


def json_line(record: Mapping[str, Any]) -> bytes:
    """Return a document as a line of JSON, without a newline."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a key other than the text contains a lone surrogate
        return json.dumps(record).encode()


class StageWriter:
    """Writes one file of a stage, completely or not at all; the same lines produce the same bytes.

    As a context manager, it removes the file on exit unless `close` was called.
    """

    def __init__(self, path: Path):
        import pyarrow as pa

        self.path = path
        self.temporary = temporary_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.temporary, "wb")
        self.stream = pa.CompressedOutputStream(pa.PythonFile(self.file, mode="w"), "zstd")
        self.lines: list[bytes] = []
        self.pending_bytes = self.num_documents = self.text_bytes = 0

    def write(self, record: Mapping[str, Any], text_bytes: int) -> None:
        """Write a document; `text_bytes` is the size of its text in UTF-8."""
        self.write_line(json_line(record), text_bytes)

    def write_line(self, line: bytes, text_bytes: int) -> None:
        """Write a document given as a line of JSON, without its newline."""
        self.lines.append(line)
        self.num_documents += 1
        self.text_bytes += text_bytes
        self.pending_bytes += len(line) + 1
        if self.pending_bytes >= BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self.lines:
            self.lines.append(b"")
            self.stream.write(b"\n".join(self.lines))
        self.lines, self.pending_bytes = [], 0

    def close(self) -> Json:
        """Publish the file, and return its entry in `stage.json`."""
        self._flush()
        self.stream.close()  # closes the file too
        sync_file(self.temporary)
        sha256 = sha256_file(self.temporary)
        size_bytes = self.temporary.stat().st_size
        os.replace(self.temporary, self.path)
        sync_directory(self.path.parent)
        return {
            "file": self.path.name,
            "size_bytes": size_bytes,
            "sha256": sha256,
            "num_documents": self.num_documents,
            "text_bytes": self.text_bytes,
        }

    def abort(self) -> None:
        """Remove the unfinished file, unless it is already published."""
        self.lines = []
        self.temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # buffered data cannot be flushed to a full disk
            if not self.file.closed:
                self.stream.close()

    def __enter__(self) -> "StageWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class _StageFile(TypedDict):
    file: Name
    size_bytes: Count
    sha256: str


class StageManifest(TypedDict):
    """The keys that every `stage.json` contains; counts and options depend on the stage."""

    stage: str
    inputs: str
    text_field: str
    files: list[_StageFile]


@dataclass(frozen=True)
class Stage:
    """A published stage."""

    directory: Path
    manifest: Json
    paths: list[Path] = field(default_factory=list)  # its files, in order

    @property
    def text_field(self) -> str:
        """The name of the field that contains the text."""
        return self.manifest["text_field"]


def is_stage(directory: str | Path) -> bool:
    """Return whether a directory is a published stage."""
    return Path(directory, STAGE_MANIFEST).is_file()


def is_unfinished(directory: str | Path) -> bool:
    """Return whether a directory contains task records but no `stage.json`: an unfinished stage."""
    if is_stage(directory):
        return False
    patterns = ("records/*/[0-9][0-9][0-9][0-9][0-9]*", "work/records/*/[0-9][0-9][0-9][0-9][0-9]*")
    return any(next(Path(directory).glob(pattern), None) is not None for pattern in patterns)


def read_stage(directory: str | Path) -> Stage:
    """Open a published stage, and check the sizes of its files.

    Raises:
        ConfigError: the stage is not published or has another version, or files are missing or
            truncated.
    """
    directory = Path(directory)
    path, fix = directory / STAGE_MANIFEST, "Run the stage again."
    manifest = read_listing(path, StageManifest, (FORMAT, VERSION), fix)
    check_listed_files(path, manifest["files"], fix)
    return Stage(directory, manifest, [directory / entry["file"] for entry in manifest["files"]])


def read_listing(path: Path, kind: Any, expected: tuple[str, int], fix: str) -> Json:
    """Read a JSON file that lists other files, such as `stage.json`.

    Args:
        kind: the `TypedDict` that describes the file's content.
        expected: required format and version.
        fix: what the user can do if the file is missing or invalid.

    Raises:
        ConfigError: the file is missing, has another version, or is damaged.
    """
    content = read_record(path, dict, fix)
    if content is None:
        raise ConfigError(
            f"{path}: is missing, so the files that it would list are unfinished. {fix}"
        )
    found = content.get("format"), content.get("version")
    if found != expected:
        raise ConfigError(
            f"{path}: is {found[0]!r} version {found[1]!r}, not {expected[0]!r} version "
            f"{expected[1]}. {fix}"
        )
    if problem := mismatch(content, kind) or digest_problem(content):
        raise RecordError(f"{path}: {problem}. It is damaged: restore it from a copy. {fix}")
    return content


def check_listed_files(path: Path, entries: Iterable[Mapping[str, Any]], fix: str) -> None:
    """Check the sizes of the files that a JSON file lists, relative to its directory.

    Raises:
        ConfigError: files are missing or have a different size.
    """
    problems = []
    for entry in entries:
        file = path.parent / entry["file"]
        size = file.stat().st_size if file.is_file() else None
        if size != entry["size_bytes"]:
            state = "is missing" if size is None else f"has {size:,} bytes"
            problems.append(
                f"{file}: {state}; {path.name} lists {entry['size_bytes']:,} bytes. {fix}"
            )
    if problems:
        raise ConfigError(problems)


def stage_of(argument: str) -> Stage | None:
    """Return the stage whose directory or file an --input names, or None if it names neither.

    Raises:
        ConfigError: the stage is damaged.
    """
    path = Path(argument)
    if is_stage(path):
        return read_stage(path)
    if path.name.endswith(STAGE_SUFFIX) and is_stage(path.parent):
        stage = read_stage(path.parent)
        return stage if path in stage.paths else None
    return None


def check_text_field(stage: Stage, text_field: str) -> None:
    """Check that the text field is the field in which the stage stores the text.

    Raises:
        ConfigError: they differ.
    """
    if stage.text_field != text_field:
        raise ConfigError(
            f"{stage.directory}: is a stage with its text in the key {stage.text_field!r}, not "
            f"{text_field!r}. Set text_field to {stage.text_field} (--text_field), and give "
            "inputs with a different key to a separate command or source."
        )


def check_stage_file(path: Path) -> None:
    """Verify the checksum of a file in a published stage; other files are not checked.

    Raises:
        ConfigError: the file is damaged. Without this check, most flipped bits would go unnoticed
            and change the text.
    """
    manifest = path.parent / STAGE_MANIFEST
    if not manifest.is_file():
        return
    expected = _checksums(manifest, manifest.stat().st_mtime_ns).get(path.name)
    if expected is not None and sha256_file(path) != expected:
        raise ConfigError(
            f"{path}: its SHA-256 differs from {STAGE_MANIFEST}. It is truncated or damaged: run "
            f"the stage again."
        )


@lru_cache(maxsize=8)
def _checksums(manifest: Path, modified_ns: int) -> dict[str, str]:
    files = json.loads(manifest.read_bytes())["files"]
    return {entry["file"]: entry["sha256"] for entry in files}


def read_stage_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a stage's file, without their newlines."""
    import pyarrow as pa

    try:
        check_stage_file(path)
        with open(path, "rb") as raw:
            stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
            rest = b""
            while block := stream.read(BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                yield from lines
    except OSError as error:
        fix = "It is truncated or damaged: run the stage again."
        raise ConfigError(unreadable(path, error, fix)) from error
    if rest:
        raise ConfigError(f"{path}: ends in the middle of a line. Run the stage again.")


def read_records(path: Path) -> Iterator[Json]:
    """Yield the documents of a stage's file, as objects."""
    for line in read_stage_lines(path):  # `json` keeps integers beyond 64 bits exact
        yield json.loads(line)


def publish_stage(
    directory: Path,
    stage: str,
    files: Sequence[Mapping[str, Any]],
    *,
    inputs: str,
    text_field: str,
    counts: Mapping[str, Any],
    options: Mapping[str, Any],
    provenance: Mapping[str, Any],
    **more: Any,
) -> Json:
    """Write `stage.json`, which makes the directory a stage, and return it.

    Args:
        files: the results of `StageWriter.close`, in order.
        inputs: fingerprint of the stage's inputs and its options.
        counts: sums over all tasks; see `merge_counts`.
        provenance: `provenance_of` the previous stage, or the inputs if this is the first stage.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "stage": stage,
        "inputs": inputs,
        "text_field": text_field,
        **counts,
        "options": options,
        **more,
        "before": provenance,
        "files": list(files),
    }
    remove_unlisted_files(directory, {entry["file"] for entry in files})
    manifest = with_digest(content)
    write_json(directory / STAGE_MANIFEST, manifest)
    return manifest


def remove_unlisted_files(directory: Path, listed: Set[str]) -> None:
    """Remove files that were left by killed tasks or by tasks with different options."""
    for path in directory.iterdir():
        if _TASK_FILE.fullmatch(path.name) and path.name not in listed:
            path.unlink(missing_ok=True)


def provenance_of(stage: Stage) -> Json:
    """Return what later stages and manifests record about a stage: its manifest without files."""
    omitted = ("files", "digest", "examples", "lengths_in", "lengths_out")
    kept = {key: value for key, value in stage.manifest.items() if key not in omitted}
    return {
        **kept,
        "num_files": len(stage.paths),
        "stage_json_sha256": sha256_file(stage.directory / STAGE_MANIFEST),
    }
