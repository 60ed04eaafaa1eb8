"""The cache of blocks on a disk that fills, and among runs that come and go."""

import errno
import fcntl
import os

import pytest

from zerolm import block_cache
from zerolm.block_cache import IN_USE, BlockCache, Cache, claim, held_bytes
from zerolm.block_sums import BLOCK_BYTES

OURS, THEIRS = f"{0:016x}-32", f"{1:016x}-32"


@pytest.mark.parametrize("num_blocks", [4, 99])  # a mirror, and less room than blocks
def test_a_block_that_was_not_written_whole_is_not_there(tmp_path, monkeypatch, num_blocks):
    """A disk that fills takes a part first, and says so by its length alone."""
    cache = BlockCache(tmp_path, num_blocks, min(num_blocks, 16))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[: len(data) // 2], at))
    cache.put(3, os.urandom(BLOCK_BYTES))
    assert cache.full == os.strerror(errno.ENOSPC)
    assert cache.is_mirror or not cache.has(3)


def test_a_claim_makes_its_own_where_another_run_cleans_up(tmp_path, monkeypatch):
    """The directory goes after it was made, then again while the claim waits for its lock."""
    mine = tmp_path / OURS
    real_open, real_lock, gone = open, block_cache._flock, []

    def remove():
        gone.append(mine.rename(tmp_path / f"gone-{len(gone)}"))

    def opened(path, mode):
        if not gone:
            remove()
        return real_open(path, mode)

    def locked(file, how):
        real_lock(file, how)
        if len(gone) == 1:
            remove()

    monkeypatch.setattr(block_cache, "open", opened, raising=False)
    monkeypatch.setattr(block_cache, "_flock", locked)
    mark = claim(Cache(mine, 32))
    assert len(gone) == 2
    assert os.path.samestat(os.fstat(mark.fileno()), (mine / IN_USE).stat())
    with open(mine / IN_USE) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    mark.close()


def test_what_others_left_is_removed_and_what_they_use_is_neither_room_nor_removed(tmp_path):
    cache, left = Cache(tmp_path / OURS, 32, (OURS,)), tmp_path / f"{2:016x}-16"
    for directory in (tmp_path / THEIRS, left, tmp_path / OURS):
        directory.mkdir()
        (directory / "blocks").write_bytes(os.urandom(1 << 20))
    (left / IN_USE).touch()
    theirs = claim(Cache(tmp_path / THEIRS, 32, (THEIRS, left.name, OURS)))
    assert 2 << 20 <= held_bytes(tmp_path, (OURS,)) < 3 << 20
    with claim(cache):
        assert sorted(path.name for path in tmp_path.iterdir()) == [OURS, THEIRS]
        assert 1 << 20 <= held_bytes(tmp_path, (OURS,)) < 2 << 20
    theirs.close()
    with claim(cache):
        assert [path.name for path in tmp_path.iterdir()] == [OURS]
