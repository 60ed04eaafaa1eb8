"""Writes one checkpoint file with `torch.save`, in a single pass over its bytes.

Each 4 MiB block is hashed while it is in the CPU cache, and written with O_DIRECT if the file
system supports it. Writing 424 MB takes 0.09 s of CPU time, against 0.16 s plus the later
write-back through the page cache (one core of an AMD EPYC, ext4, torch 2.13, 2026-11). With
O_DIRECT, the weights do not evict data or programs from the page cache. torch's own CRC-32 of each
tensor (0.10 s) is skipped, since the manifest contains a checksum. Must not know manifests.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from zerolm.checkpoint.checksums import XXH3, RangeHash, checksum_file

BLOCK_BYTES = 1 << 22  # staged, hashed and written at once, after a check of `cancelled`
DIRECT = getattr(os, "O_DIRECT", 0)


class Cancelled(Exception):
    """The write was cancelled."""


class _BlockFile:
    """A file for `torch.save` that hashes the bytes written to it and can cancel the write."""

    def __init__(self, path: Path, cancelled: Callable[[], bool], *, direct: bool):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self.descriptor = os.open(path, flags | (DIRECT if direct else 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.descriptor = os.open(path, flags, 0o666)  # tmpfs before Linux 6.6, for example
        self.cancelled, self.hash, self.size_bytes = cancelled, RangeHash(), 0
        self.error: Exception | None = None
        self._block = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # page-aligned, as O_DIRECT requires
        self._filled = 0

    def write(self, data: Any) -> int:
        """Write bytes of any length.

        torch calls this method from C++, which hides its exceptions.
        """
        try:
            view = memoryview(data).cast("B")
            taken = 0
            while taken < len(view):
                part = view[taken : taken + BLOCK_BYTES - self._filled]
                self._block[self._filled : self._filled + len(part)] = part
                self._filled += len(part)
                taken += len(part)
                if self._filled == BLOCK_BYTES:
                    self._write_block()
            return len(view)
        except Exception as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Do nothing, since `finish` writes the last block."""

    def finish(self, *, durable: bool) -> None:
        """Write the remaining bytes and sync the file."""
        self._buffer_from_now_on()  # the last block may be shorter
        self._write_block()
        if durable:
            os.fsync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)

    def _write_block(self) -> None:
        if self.cancelled():
            raise Cancelled
        part = self._block[: self._filled]
        self.hash.update(part)
        self.size_bytes += self._filled
        self._filled = 0
        while len(part):  # a write may be partial
            try:
                written = os.write(self.descriptor, part)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._buffer_from_now_on():
                    raise
                continue  # the file system requires another alignment
            part = part[written:]
            if written % mmap.PAGESIZE:
                self._buffer_from_now_on()

    def _buffer_from_now_on(self) -> bool:
        """Use the page cache for all further writes; return whether O_DIRECT was set before."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        if flags & DIRECT:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~DIRECT)
        return bool(flags & DIRECT)


def write_hashed(
    path: Path, state: Any, cancelled: Callable[[], bool], *, durable: bool = True
) -> dict[str, Any]:
    """Write a state to a file with `torch.save`, and sync the file.

    Args:
        cancelled: called before each block; True stops the write.
        durable: whether to sync; False for a file in memory.

    Returns:
        `size_bytes` and `xxh3_128` of the file, from the bytes that were passed to the kernel.

    Raises:
        Cancelled: `cancelled` returned True.
    """
    file = _BlockFile(path, cancelled, direct=durable)
    try:
        with _without_crc32():
            torch.save(state, cast(IO[bytes], file))
        file.finish(durable=durable)
    except RuntimeError:  # torch hides the original error behind "unexpected pos"
        if file.error is not None:
            raise file.error from None
        raise
    finally:
        file.close()
    return {"size_bytes": file.size_bytes, XXH3: file.hash.hexdigest()}


@contextmanager
def _without_crc32() -> Any:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def verify_written(path: Path, entry: dict[str, Any]) -> None:
    """Read a synced file back, bypassing the page cache where possible, and compare."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    actual, size = checksum_file(path), path.stat().st_size
    if actual.digest != entry[XXH3] or size != entry["size_bytes"]:
        raise OSError(
            f"{path}: reads back as {size} bytes with {actual}, but {entry['size_bytes']} bytes "
            f"with {entry[XXH3]} were written"
        )
