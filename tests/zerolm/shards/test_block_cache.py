"""The block cache on a disk that fills, and shared by runs that start and end."""

import errno
import fcntl
import os

import pytest

from zerolm.common import locks
from zerolm.shards.block_cache import IN_USE, BlockCache, Cache, lock_cache, reclaimable_bytes
from zerolm.shards.checksums import BLOCK_BYTES

OURS, THEIRS = f"{0:016x}-32", f"{1:016x}-32"


@pytest.mark.parametrize("num_blocks", [4, 99])  # a mirror, and less room than blocks
def test_a_block_that_was_written_partly_is_not_cached(tmp_path, monkeypatch, num_blocks):
    """A disk that fills first writes a part, and reports only its length."""
    cache = BlockCache(tmp_path, num_blocks, min(num_blocks, 16))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[: len(data) // 2], at))
    cache.put(3, os.urandom(BLOCK_BYTES))
    assert cache.write_error == os.strerror(errno.ENOSPC)
    assert cache.is_mirror or not cache.has(3)


def test_a_cache_is_made_again_if_another_run_removes_it_meanwhile(tmp_path, monkeypatch):
    """The directory is removed after it was made, and again while its lock is awaited."""
    mine = tmp_path / OURS
    real_open, real_lock, gone = open, locks.fcntl.flock, []

    def remove():
        gone.append(mine.rename(tmp_path / f"gone-{len(gone)}"))

    def opened(*arguments, **options):
        if not gone:
            remove()
        return real_open(*arguments, **options)

    def locked(file, how):
        real_lock(file, how)
        if len(gone) == 1:
            remove()

    with monkeypatch.context() as patched:
        patched.setattr(locks, "open", opened, raising=False)
        patched.setattr(locks.fcntl, "flock", locked)
        mark = lock_cache(Cache(mine, 32))
    assert len(gone) == 2
    with open(mine / IN_USE) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    mark.release()


def test_unused_caches_are_removed_and_used_ones_are_neither_removed_nor_counted(tmp_path):
    cache, left = Cache(tmp_path / OURS, 32, (OURS,)), tmp_path / f"{2:016x}-16"
    for directory in (tmp_path / THEIRS, left, tmp_path / OURS):
        directory.mkdir()
        (directory / "blocks").write_bytes(os.urandom(1 << 20))
    (left / IN_USE).touch()
    theirs = lock_cache(Cache(tmp_path / THEIRS, 32, (THEIRS, left.name, OURS)))
    assert 2 << 20 <= reclaimable_bytes(tmp_path, (OURS,)) < 3 << 20
    with lock_cache(cache):
        assert sorted(path.name for path in tmp_path.iterdir()) == [OURS, THEIRS]
        assert 1 << 20 <= reclaimable_bytes(tmp_path, (OURS,)) < 2 << 20
    theirs.release()
    with lock_cache(cache):
        assert [path.name for path in tmp_path.iterdir()] == [OURS]
