"""The files of a shard directory on this machine. Each block is checked when it is first read.

zerolm/remote_shards.py does the same for files in a store. Both know the format's files, not what a
source, a window or a document is.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from zerolm.block_sums import BLOCK_BYTES, block_sum
from zerolm.errors import ShardReadError
from zerolm.manifest import DTYPES, TOKENIZER_DIRECTORY, files_of

SUMS_KEPT = 1024  # shards whose sums stay in memory: 34 MB of those of 256 MiB, in each process


class LocalFiles:
    """Reads shards through memory maps. Nothing is open before it is read.

    Args:
        directory: of the shards.
        manifest: checked.
    """

    is_remote = False

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory, self.manifest = directory, manifest
        self.dtype = DTYPES[manifest["dtype"]]
        # Of each open shard: its ids, and a byte for each block, 1 until it is checked.
        self._open: dict[int, tuple[np.ndarray, bytearray]] = {}
        self._sums: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:  # maps are not sent: each process opens its own
        return {**self.__dict__, "_open": {}, "_sums": {}}

    def problems(self) -> list[str]:
        """Return what is wrong with the sizes of the files, a line each."""
        problems = []
        for shard in self.manifest["shards"]:
            for name, size, _ in files_of(shard):
                path = self.directory / name
                if not path.is_file():
                    problems.append(
                        f"{path}: the manifest lists it, but it is missing. Restore it, or "
                        f"tokenize again."
                    )
                elif path.stat().st_size != size:
                    problems.append(
                        f"{path}: {path.stat().st_size} bytes, the manifest says {size}. "
                        f"The file was cut or overwritten: restore it, or tokenize again."
                    )
        return problems

    def ids(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the ids at [start, stop) of a shard, a read-only view.

        Raises:
            ShardReadError: a block of them is not as it was written.
        """
        tokens, unchecked = self._open.get(number) or self._opened(number)
        size = self.dtype.itemsize
        first, end = start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES)
        if unchecked.find(1, first, end) >= 0:
            self._check(number, first, end)
        return tokens[start:stop]

    def shard(self, number: int) -> np.ndarray:
        """Return all ids of a shard, unchecked."""
        return (self._open.get(number) or self._opened(number))[0]

    def bytes_of(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes of a file of the directory, unchecked, fewer if there are no more."""
        with open(self.directory / name, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def sidecar(self, number: int, key: str) -> bytes:
        """Return what lies beside a shard, unchecked: `index`, `sums` or `origins`."""
        return self.bytes_of(self.manifest["shards"][number][key])

    def tokenizer_directory(self) -> Path:
        """Return where the tokenizer's copy is, or would be."""
        return self.directory / TOKENIZER_DIRECTORY

    def _opened(self, number: int) -> tuple[np.ndarray, bytearray]:
        shard = self.manifest["shards"][number]
        # A plain ndarray view: slicing np.memmap itself costs 2 us of subclass bookkeeping.
        tokens = np.memmap(self.directory / shard["file"], self.dtype, mode="r").view(np.ndarray)
        blocks = shard["sums_size_bytes"] // 8 if "sums" in shard else 0
        self._open[number] = tokens, bytearray(b"\1" * blocks)
        return self._open[number]

    def _check(self, number: int, first: int, end: int) -> None:
        """Check those blocks of [first, end) that are not yet."""
        tokens, unchecked = self._open[number]
        shard, sums = self.manifest["shards"][number], self._sums_of(number)
        content = memoryview(tokens).cast("B")  # type: ignore[arg-type]
        for block in range(first, end):
            if not unchecked[block]:
                continue
            part = content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if block_sum(part) != int(sums[block]):
                raise ShardReadError(
                    damage(self.directory / shard["file"], shard["num_tokens"], block, self.dtype)
                )
            unchecked[block] = 0

    def _sums_of(self, number: int) -> np.ndarray:
        """Return the sums of a shard's blocks; those that were used last are kept."""
        sums = self._sums.pop(number, None)
        if sums is None:
            shard = self.manifest["shards"][number]
            where = self.directory / shard["sums"]
            sums = checked_sums(where, where.read_bytes(), shard)
        self._sums[number] = sums
        while len(self._sums) > SUMS_KEPT:
            del self._sums[next(iter(self._sums))]
        return sums


def checked_sums(where: Any, content: bytes, shard: dict[str, Any]) -> np.ndarray:
    """Return the sums of a shard's blocks, (B,) uint64.

    Raises:
        ShardReadError: they are not those of the manifest.
    """
    if hashlib.sha256(content).hexdigest() != shard["sums_sha256"]:
        raise ShardReadError(
            f"{where}: not the sums that the manifest names (SHA-256). The file is damaged: "
            f"restore it, or tokenize again."
        )
    return np.frombuffer(content, "<u8")


def damage(where: Any, num_tokens: int, block: int, dtype: np.dtype) -> str:
    """Say that a block of a file is not as it was written."""
    per_block = BLOCK_BYTES // dtype.itemsize
    stop = min((block + 1) * per_block, num_tokens)
    return (
        f"{where}: block {block} (bytes from {block * BLOCK_BYTES}, tokens {block * per_block} to "
        f"{stop}) is not as it was written: its sum differs. The file is damaged: restore it (and "
        f"look at its disk), or tokenize again; python -m data_prep verify tells what else is."
    )
