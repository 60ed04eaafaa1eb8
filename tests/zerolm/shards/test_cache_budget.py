"""Where the cache of a node may be."""

import pytest

from zerolm import data_cache
from zerolm.settings import Settings

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:26 / {memory} rw,nosuid shared:13 - tmpfs tmpfs rw
31 30 8:2 / {memory}/with\\040disk rw - xfs /dev/sdb1 rw
"""


def test_a_place_is_in_memory_by_the_mount_it_lies_in(tmp_path):
    mounts, memory = tmp_path / "mountinfo", tmp_path / "memory"
    mounts.write_text(MOUNTS.format(memory=memory))
    for path, found in (
        (memory, True), (memory / "a" / "b", True), (memory / "with disk" / "a", False),
        (tmp_path / "memory2", False),
    ):  # fmt: skip
        assert data_cache._is_in_memory(path, mounts) == found, path
    assert not data_cache._is_in_memory(memory, tmp_path / "absent")


@pytest.mark.parametrize("given", [None, "there"])
def test_memory_is_taken_for_a_cache_only_if_it_is_meant(tmp_path, monkeypatch, given):
    monkeypatch.setattr(data_cache, "_is_in_memory", lambda *_: True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = Settings(data_cache=given and str(tmp_path / given))
    found = data_cache._room_problems(settings, data_cache.directory_of(settings), 1 << 20, ())
    assert len(found) == (given is None) and all("(tmpfs)" in line for line in found)
