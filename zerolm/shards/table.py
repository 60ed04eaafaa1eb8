"""`shards.table`: the entries of all shards in one memory-mapped table, for fast starts.

The manifest of 75,000 shards (10 T tokens) takes two seconds and 127 MB to parse. With a table, all
processes on a node share its pages instead. The manifest still defines the data: a table that is
damaged or belongs to another manifest is not used. docs/formats.md describes the file.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson
import xxhash

from zerolm.common.errors import ShardError
from zerolm.shards.disk import map_file
from zerolm.shards.manifest import FILE_KEYS, MANIFEST

TABLE = "shards.table"
MIN_SHARDS = 256  # smaller manifests are parsed in a millisecond
SUFFIXES = {"file": ".bin", "index": ".idx", "sums": ".sums", "origins": ".org", "fine": ".fine"}
COUNTS = ("num_tokens", "num_documents")

_MAGIC = b"zlmtbl01"
# Magic; XXH3-64 of everything after these two fields; XXH3-128 and size of the manifest; number of
# shards; size of the head; and one bit for each key in FILE_KEYS, set if shards have that file.
_HEADER = struct.Struct("<8sQ16sQQII")
_CHECKED_FROM = 16
_BITS = {key: 1 << number for number, key in enumerate(FILE_KEYS)}
_READ_BYTES = 1 << 20


class ShardTable(Sequence[dict[str, Any]]):
    """A manifest's `shards` entries, created on access from a table's (S,) records."""

    def __init__(self, records: np.ndarray):
        self.records = records
        names = records.dtype.names or ()
        self.files = [key for key, size_key in FILE_KEYS.items() if size_key in names]

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, number: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        record = self.records[number]
        entry: dict[str, Any] = {}
        for key in self.files:
            entry[key] = _file_name(number, key)
            if key == "file":
                entry |= {name: int(record[name]) for name in COUNTS}
            entry[FILE_KEYS[key]] = int(record[FILE_KEYS[key]])
            entry[_digest_key(key)] = bytes(record[_digest_key(key)]).hex()
        return entry


def column(shards: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    """Return the values of a numeric key for all shards: (S,) int64."""
    if isinstance(shards, ShardTable):
        return shards.records[key].astype(np.int64)
    return np.array([shard[key] for shard in shards], np.int64)


def digest_lines(shards: Sequence[dict[str, Any]]) -> str:
    """Return the hex SHA-256 of each shard's token file, one per line."""
    if isinstance(shards, ShardTable):
        digests = np.ascontiguousarray(shards.records["sha256"])
        return digests.tobytes().hex("\n", digests.itemsize)
    return "\n".join(shard["sha256"] for shard in shards)


def all_have(shards: Sequence[dict[str, Any]], key: str) -> bool:
    """Return whether every shard has the file with this manifest key, such as `sums` or
    `origins`.
    """
    if isinstance(shards, ShardTable):
        return key in shards.files
    return all(key in shard for shard in shards)


def encode_table(content: bytes) -> bytes | None:
    """Encode the table for a manifest, given the valid content of manifest.json.

    Returns None if a table cannot represent the manifest's shards, because they have unusual file
    names, files that only some of them have, or additional keys.
    """
    manifest = orjson.loads(content)
    shards = manifest.pop("shards")
    files = [key for key in FILE_KEYS if key in shards[0]]
    keys = {name for key in files for name in (key, FILE_KEYS[key], _digest_key(key))}
    keys |= set(COUNTS)
    records = np.zeros(len(shards), _record_type(files))
    table = ShardTable(records)
    try:
        for name in (*COUNTS, *(FILE_KEYS[key] for key in files)):
            records[name] = [shard[name] for shard in shards]
        for key in files:
            digests = b"".join(bytes.fromhex(shard[_digest_key(key)]) for shard in shards)
            records[_digest_key(key)] = np.frombuffer(digests, "V32")
    except (KeyError, ValueError):
        return None
    if any(set(shard) != keys for shard in shards) or list(table) != shards:
        return None
    head = orjson.dumps(manifest)
    head += b" " * (-(_HEADER.size + len(head)) % 8)
    link, bits = xxhash.xxh3_128_digest(content), sum(_BITS[key] for key in files)
    header = _HEADER.pack(_MAGIC, 0, link, len(content), len(shards), len(head), bits)
    checked = header[_CHECKED_FROM:] + head + records.tobytes()
    checksum = xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little")
    return _MAGIC + checksum + checked


def read_table(directory: Path) -> tuple[dict[str, Any], ShardTable] | None:
    """Map a directory's table; return (manifest without shards, shards), or None without a table.

    Raises:
        ShardError: the table is damaged, or was made from another manifest.
    """
    path, manifest = directory / TABLE, directory / MANIFEST
    try:
        size, manifest_size = path.stat().st_size, manifest.stat().st_size
    except OSError:
        return None
    content = map_file(path, size) if size >= _HEADER.size else b""
    if content[:8] != _MAGIC:
        raise _unusable(path, f"does not start with {_MAGIC.decode()}")
    _, checksum, link, linked_size, num_shards, head_size, bits = _HEADER.unpack_from(content)
    if xxhash.xxh3_64_intdigest(memoryview(content)[_CHECKED_FROM:]) != checksum:
        raise _unusable(path, "is damaged: its checksum differs")
    if manifest_size != linked_size or _digest(manifest) != link:
        raise _unusable(path, f"was made from another {MANIFEST}")
    start = _HEADER.size + head_size
    head = orjson.loads(content[_HEADER.size : start])
    files = [key for key, bit in _BITS.items() if bits & bit]
    records = np.frombuffer(content, _record_type(files), num_shards, start)
    return head, ShardTable(records)


def _unusable(path: Path, reason: str) -> ShardError:
    return ShardError(
        f"{path}: {reason}. Remove it; runs then parse {MANIFEST} at the start (2 s for 75,000 "
        "shards)."
    )


def _digest(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.digest()


def _record_type(files: Sequence[str]) -> np.dtype:
    fields = [(name, "<u8") for name in COUNTS]
    for key in files:
        fields += [(FILE_KEYS[key], "<u8"), (_digest_key(key), "V32")]
    return np.dtype(fields)


def _file_name(number: int, key: str) -> str:
    return f"shard-{number:05d}{SUFFIXES[key]}"


def _digest_key(key: str) -> str:
    return "sha256" if key == "file" else f"{key}_sha256"
