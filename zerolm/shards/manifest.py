"""The manifest of a token shard directory: its keys, and the validation of its content.
docs/formats.md describes each key.

Reads only the manifest.
"""

import codecs
import json
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath
from shlex import quote
from typing import Any, TypedDict

import numpy as np
import orjson

from zerolm.common.errors import ShardError
from zerolm.common.records import (
    Count,
    Name,
    RelativePath,
    digest_problem,
    mismatch,
    unreadable,
)
from zerolm.shards.checksums import CHECKSUM_BYTES, CHECKSUM_FILES, num_blocks

FORMAT = "zerolm-shards"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER_DIRECTORY = "tokenizer"
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class _File(TypedDict):
    size_bytes: Count
    sha256: str


class _InputFiles(_File):
    file: Name


class _TokenizerFile(_File):
    file: RelativePath  # in TOKENIZER_DIRECTORY


class _NamedTokenizer(TypedDict):
    fingerprint: str


class _Tokenizer(_NamedTokenizer, total=False):
    files: list[_TokenizerFile]


class _RequiredFiles(_File):
    file: Name
    num_tokens: Count
    num_documents: Count
    index: Name
    index_size_bytes: Count
    index_sha256: str


class _Shard(_RequiredFiles, total=False):
    sums: Name
    sums_size_bytes: Count
    sums_sha256: str
    fine: Name
    fine_size_bytes: Count
    fine_sha256: str
    origins: Name
    origins_size_bytes: Count
    origins_sha256: str


class _RequiredKeys(TypedDict):
    dtype: str
    vocab_size: Count
    eos_id: Count
    num_tokens: Count
    num_documents: Count
    tokenizer: _Tokenizer
    shards: list[_Shard]


class _Manifest(_RequiredKeys, total=False):
    bos_id: Count
    input_files: _InputFiles


# Optional files of a shard: block checksums, document origins.
SIDECARS = ("sums", "origins", "fine")
_SIDECAR_KEYS = ("_size_bytes", "_sha256")  # suffixes of the keys for each sidecar
# Files of a shard, as {manifest key of the name: manifest key of the size}.
FILE_KEYS = {"file": "size_bytes"} | {key: f"{key}_size_bytes" for key in ("index", *SIDECARS)}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 if it can represent every id below `vocab_size`, else uint32."""
    return DTYPES["uint16" if vocab_size <= 1 << 16 else "uint32"]


def new_manifest(
    vocab_size: int,
    eos_id: int,
    tokenizer: dict[str, Any],
    shards: Sequence[dict[str, Any]],
    **more: Any,
) -> dict[str, Any]:
    """Return a manifest that lists finished shards; `more` are further keys, such as provenance."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(vocab_size).name,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "num_tokens": sum(shard["num_tokens"] for shard in shards),
        "num_documents": sum(shard["num_documents"] for shard in shards),
        "tokenizer": tokenizer,
        "shards": list(shards),
        **more,
    }


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest and check that it is complete and consistent.

    Raises:
        ShardError: the manifest is missing, has another format or version, or has invalid keys.
    """
    path = directory / MANIFEST
    if directory.is_file():
        shards = directory.with_name(directory.name.partition(".")[0] + "-shards")
        raise ShardError(
            f"{directory}: is a file, not a token shard directory. Tokenize it, and give {shards}: "
            f"zerolm data tokenize --input {quote(str(directory))} --tokenizer DIR "
            f"--output {quote(str(shards))}"
        )
    if not path.is_file():
        reason = (
            f"no {MANIFEST}, so this is not a token shard directory (or its tokenization did not "
            f"finish)"
            if directory.is_dir()
            else "no such directory"
        )
        raise ShardError(
            f"{directory}: {reason}. Name a directory of token shards, or make one with: "
            f"zerolm data tokenize --output {quote(str(directory))} ..."
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ShardError(unreadable(path, error, "Tokenize again.")) from error
    return parse_manifest(content, path)


def parse_manifest(content: bytes, path: PurePath) -> dict[str, Any]:
    """Parse and check the content of a manifest, like `read_manifest` but without reading a file.

    Args:
        path: path of the manifest, for messages.

    Raises:
        ShardError: the content is not JSON, has another format or version, a key of a wrong type or
            contradictory numbers (all are listed), or was changed after it was written.
    """
    try:
        content = content.removeprefix(codecs.BOM_UTF8)
        manifest = orjson.loads(content)
    except ValueError as error:
        raise ShardError(f"{path}: cannot be read as JSON ({error}). Tokenize again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ShardError(f"{path}: format is not {FORMAT!r}. This is not a token shard directory.")
    if manifest.get("version") != VERSION:
        raise ShardError(
            f"{path}: version {manifest.get('version')!r}, but this release reads version "
            f"{VERSION}. Tokenize again, or use the release that wrote it."
        )
    wrong = mismatch(manifest, _Manifest)
    if problems := [f"{wrong}."] if wrong else _contradictions(manifest):
        raise ShardError([f"{path}: {problem} Tokenize again." for problem in problems])
    # orjson reads integers over 64 bits as floats; retry with json, which is slow, only if needed.
    if digest_problem(manifest) and (changed := digest_problem(json.loads(content))):
        raise ShardError(f"{path}: {changed}. {_repair(manifest)}")
    return manifest


def _repair(manifest: dict[str, Any]) -> str:
    command = manifest.get("command")
    again = shlex.join(map(str, command)) if isinstance(command, list) else "zerolm data tokenize"
    return f"Restore it from a copy, or remove the directory and recreate it: {again}"


def wrong_id(content: Any, manifest: dict[str, Any]) -> str | None:
    """Return a problem if a block contains an invalid id, even if its checksum is correct; else
    None.

    Args:
        content: the block, any contiguous buffer.
    """
    dtype, vocab_size = DTYPES[manifest["dtype"]], manifest["vocab_size"]
    if vocab_size >> (8 * dtype.itemsize):
        return None  # every value of the dtype is a valid id
    largest = int(np.frombuffer(content, dtype).max())
    if largest < vocab_size:
        return None
    return (
        f"contains token id {largest}, which is not below the manifest's vocabulary size "
        f"{vocab_size}: the shard was written incorrectly. Tokenize again."
    )


def files_of(shard: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Return (name, size in bytes, SHA-256) for each file of a shard, starting with the token
    file.
    """
    files = [
        (shard["file"], shard["size_bytes"], shard["sha256"]),
        (shard["index"], shard["index_size_bytes"], shard["index_sha256"]),
    ]
    present = [key for key in SIDECARS if key in shard]
    return files + [
        (shard[key], shard[f"{key}_size_bytes"], shard[f"{key}_sha256"]) for key in present
    ]


def _contradictions(manifest: dict[str, Any]) -> list[str]:
    """Return a problem for each contradictory value in a manifest whose keys have the right
    types.
    """
    problems = []
    vocab_size = manifest["vocab_size"]
    if manifest["eos_id"] >= vocab_size:
        problems.append(f"eos_id {manifest['eos_id']} is not below vocab_size {vocab_size}.")
    bos_id = manifest.get("bos_id")
    if bos_id is not None and (bos_id >= vocab_size or bos_id == manifest["eos_id"]):
        problems.append(f"bos_id {bos_id} is eos_id, or is not below vocab_size {vocab_size}.")
    dtype = DTYPES.get(manifest["dtype"])
    if dtype is None:
        problems.append(f"dtype is {manifest['dtype']!r}, not uint16 or uint32.")
    elif vocab_size > 1 << (8 * dtype.itemsize):
        problems.append(f"dtype {manifest['dtype']} cannot hold vocab_size {vocab_size}.")
    if not manifest["shards"]:
        problems.append("shards is empty.")
    for key in ("num_tokens", "num_documents"):
        total = sum(shard[key] for shard in manifest["shards"])
        if total != manifest[key]:
            problems.append(f"{key} is {manifest[key]}, but the shards add up to {total}.")
    for number, shard in enumerate(manifest["shards"]):
        ends = [f"{key}{end}" for key in SIDECARS if key in shard for end in _SIDECAR_KEYS]
        if missing := [key for key in ends if key not in shard]:
            problems.append(f"shards[{number}].{missing[0]}: missing.")
            continue
        if dtype is not None and shard["size_bytes"] != shard["num_tokens"] * dtype.itemsize:
            problems.append(
                f"{shard['file']}: size_bytes {shard['size_bytes']} is not "
                f"{shard['num_tokens']} tokens of {manifest['dtype']}."
            )
        if shard["index_size_bytes"] != shard["num_documents"] * 8:
            problems.append(
                f"{shard['index']}: index_size_bytes {shard['index_size_bytes']} is not "
                f"{shard['num_documents']} documents of 8 bytes."
            )
        for key, (_, block_bytes) in CHECKSUM_FILES.items():
            blocks = num_blocks(shard["size_bytes"], block_bytes)
            if key in shard and shard[f"{key}_size_bytes"] != CHECKSUM_BYTES * blocks:
                problems.append(
                    f"{shard[key]}: {key}_size_bytes {shard[f'{key}_size_bytes']} is not "
                    f"{blocks} blocks of {CHECKSUM_BYTES} bytes."
                )
        if "origins" in shard and shard["origins_size_bytes"] != shard["num_documents"] * 8:
            problems.append(
                f"{shard['origins']}: origins_size_bytes {shard['origins_size_bytes']} is not "
                f"{shard['num_documents']} documents of 8 bytes."
            )
        if shard["num_documents"] == 0 or shard["num_tokens"] == 0:
            problems.append(f"{shard['file']}: has no documents or no tokens.")
    return problems
