"""The manifest of a token shard directory: its keys, and the validation of its content.

docs/formats.md describes each key. Reads no file but the manifest.
"""

import codecs
import json
import re
import shlex
from pathlib import Path, PurePath
from shlex import quote
from typing import Any

import numpy as np
import orjson

from zerolm.common.errors import ShardError
from zerolm.common.records import digest_problem, unreadable
from zerolm.shards.checksums import CHECKSUM_BYTES, CHECKSUM_FILES, num_blocks

FORMAT = "zerolm-shards"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER_DIRECTORY = "tokenizer"
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_KEYS: dict[str, type] = {
    "dtype": str,
    "vocab_size": int,
    "eos_id": int,
    "num_tokens": int,
    "num_documents": int,
    "tokenizer": dict,
    "shards": list,
}
_SHARD_KEYS: dict[str, type] = {
    "file": str,
    "num_tokens": int,
    "num_documents": int,
    "size_bytes": int,
    "sha256": str,
    "index": str,
    "index_size_bytes": int,
    "index_sha256": str,
}
# Files beside a shard that older releases did not write: block checksums, origins of documents.
SIDECARS = ("sums", "origins", "fine")
# The files of a shard: manifest key of the name -> manifest key of the size.
FILE_KEYS = {"file": "size_bytes"} | {key: f"{key}_size_bytes" for key in ("index", *SIDECARS)}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # cannot leave the directory
_FILE_NAME_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-"
_OTHER_FILE_KEYS: dict[str, type] = {"file": str, "size_bytes": int, "sha256": str}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smaller of uint16 and uint32 that holds every id below `vocab_size`."""
    return DTYPES["uint16" if vocab_size <= 1 << 16 else "uint32"]


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest and check that it is complete and consistent.

    Raises:
        ShardError: no manifest, another format or version, or invalid keys; all are listed.
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
    """Parse and check the content of a manifest; `read_manifest` without reading the file.

    Args:
        path: path of the manifest, for messages.

    Raises:
        ShardError: not JSON, another format or version, or invalid keys, all of which are listed;
            or changed after it was written.
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
    problems = _wrong_keys(manifest, _KEYS, "")
    if not problems:
        suspects = [] if _all_shards_valid(manifest) else manifest["shards"]
        for number, shard in enumerate(suspects):
            keys = _SHARD_KEYS | _sidecar_keys(shard)
            problems += _wrong_keys(shard, keys, f"shards[{number}].")
        problems += _wrong_other_files(manifest)
        problems = problems or _contradictions(manifest, suspects)
    if problems:
        raise ShardError([f"{path}: {problem} Tokenize again." for problem in problems])
    # orjson reads integers of more than 64 bits as floats; they are rare, and json is slow.
    if digest_problem(manifest) and (changed := digest_problem(json.loads(content))):
        raise ShardError(f"{path}: {changed}. {_repair(manifest)}")
    return manifest


def _repair(manifest: dict[str, Any]) -> str:
    command = manifest.get("command")
    again = shlex.join(map(str, command)) if isinstance(command, list) else "zerolm data tokenize"
    return f"Restore it from a copy, or remove the directory and make it again: {again}"


def wrong_id(content: Any, manifest: dict[str, Any]) -> str | None:
    """Return what is wrong with the ids of a block, whatever its checksum; None if nothing is.

    Args:
        content: the block, any contiguous buffer.
    """
    dtype, vocab_size = DTYPES[manifest["dtype"]], manifest["vocab_size"]
    if vocab_size >> (8 * dtype.itemsize):
        return None  # every number of the dtype is an id
    largest = int(np.frombuffer(content, dtype).max())
    if largest < vocab_size:
        return None
    return (
        f"has token id {largest}, which is not below the vocabulary size {vocab_size} of its "
        f"manifest: the shard was written wrongly. Tokenize again."
    )


def files_of(shard: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Return (name, size in bytes, SHA-256) of each file of a shard, the token file first."""
    files = [
        (shard["file"], shard["size_bytes"], shard["sha256"]),
        (shard["index"], shard["index_size_bytes"], shard["index_sha256"]),
    ]
    present = [key for key in SIDECARS if key in shard]
    return files + [
        (shard[key], shard[f"{key}_size_bytes"], shard[f"{key}_sha256"]) for key in present
    ]


def _sidecar_keys(shard: Any) -> dict[str, type]:
    present = [key for key in SIDECARS if isinstance(shard, dict) and key in shard]
    return {
        name: kind
        for key in present
        for name, kind in ((key, str), (f"{key}_size_bytes", int), (f"{key}_sha256", str))
    }


def _wrong_other_files(manifest: dict[str, Any]) -> list[str]:
    """Return the problems of the entries of the tokenizer's files and of the input list."""
    problems = []
    if "input_files" in manifest:
        problems += _wrong_keys(manifest["input_files"], _OTHER_FILE_KEYS, "input_files.")
    files = manifest["tokenizer"].get("files", [])
    if not isinstance(files, list):
        return [*problems, f"tokenizer.files is {files!r}, not a list."]
    keys = {key: kind for key, kind in _OTHER_FILE_KEYS.items() if key != "file"}
    for number, entry in enumerate(files):
        prefix = f"tokenizer.files[{number}]."
        wrong = _wrong_keys(entry, keys, prefix)
        if isinstance(entry, dict) and not _is_relative_path(entry.get("file")):
            wrong.append(
                f"{prefix}file is {entry.get('file')!r}, not a path in {TOKENIZER_DIRECTORY}/."
            )
        problems += wrong
    return problems


def _is_relative_path(name: Any) -> bool:
    """Return whether a name is a relative path that cannot leave its directory."""
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    return bool(name) and all(part not in ("", ".", "..") for part in name.split("/"))


def _wrong_keys(value: Any, keys: dict[str, type], prefix: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{prefix.rstrip('.')} is not an object."]
    problems = []
    for key, kind in keys.items():
        if key not in value:
            problems.append(f"{prefix}{key} is missing.")
        elif not isinstance(value[key], kind) or isinstance(value[key], bool):
            problems.append(f"{prefix}{key} is {value[key]!r}, not of type {kind.__name__}.")
        elif kind is int and value[key] < 0:
            problems.append(f"{prefix}{key} is {value[key]}, below zero.")
        elif key in ("file", "index", *SIDECARS) and not _FILE_NAME.fullmatch(value[key]):
            problems.append(f"{prefix}{key} is {value[key]!r}, not a plain file name.")
    return problems


def _all_shards_valid(manifest: dict[str, Any]) -> bool:
    """Return whether the entries of all shards are certainly valid; fast, False if in doubt.

    10 T tokens have 75 thousand entries; checking them one by one takes seconds.
    """
    shards, dtype = manifest["shards"], DTYPES.get(manifest["dtype"])
    if not shards or dtype is None or set(map(type, shards)) != {dict}:
        return False
    keys = _SHARD_KEYS | _sidecar_keys(shards[0])
    if any(key in shard for key in SIDECARS if key not in keys for shard in shards):
        return False
    try:
        columns = {key: [shard[key] for shard in shards] for key in keys}
        if any(set(map(type, columns[key])) != {kind} for key, kind in keys.items()):
            return False
        names = [name for key in ("file", "index", *SIDECARS) for name in columns.get(key, [])]
        numbers = {
            key: np.array(columns[key], np.int64) for key, kind in keys.items() if kind is int
        }
    except (KeyError, OverflowError):
        return False
    if any(number.min() < 0 or number.max() >= 1 << 56 for number in numbers.values()):
        return False
    documents, size = numbers["num_documents"], numbers["size_bytes"]
    sums = {
        key: CHECKSUM_BYTES * -(-size // block_bytes)
        for key, (_, block_bytes) in CHECKSUM_FILES.items()
    }
    return bool(
        _are_file_names(names)
        and all(sum(columns[key]) == manifest[key] for key in ("num_tokens", "num_documents"))
        and min(documents.min(), numbers["num_tokens"].min()) > 0
        and (size == numbers["num_tokens"] * dtype.itemsize).all()
        and (numbers["index_size_bytes"] == documents * 8).all()
        and (numbers.get("origins_size_bytes", documents * 8) == documents * 8).all()
        and all(
            (numbers.get(f"{key}_size_bytes", each) == each).all() for key, each in sums.items()
        )
    )


def _are_file_names(names: list[str]) -> bool:
    """Return whether `_FILE_NAME` matches every name; one pass over the joined names."""
    text = "\n".join(names)
    starts_wrong = any(f"\n{mark}" in f"\n{text}\n" for mark in "\n.-")
    return (
        text.isascii()
        and not starts_wrong
        and text.encode().translate(None, _FILE_NAME_BYTES) == b"\n" * (len(names) - 1)
    )


def _contradictions(manifest: dict[str, Any], shards: list[dict[str, Any]]) -> list[str]:
    """Check the numbers of a manifest, which has all keys, against each other.

    Args:
        shards: the entries of shards to check one by one.
    """
    problems = []
    vocab_size = manifest["vocab_size"]
    if not isinstance(manifest["tokenizer"].get("fingerprint"), str):
        problems.append("tokenizer.fingerprint is missing.")
    if manifest["eos_id"] >= vocab_size:
        problems.append(f"eos_id {manifest['eos_id']} is not below vocab_size {vocab_size}.")
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
            problems.append(f"{key} is {manifest[key]}, but its shards have {total} together.")
    for shard in shards:
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
