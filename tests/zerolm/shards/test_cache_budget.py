"""Which directories the cache of a node may use."""

import pytest

from zerolm.parts.settings import RunSettings
from zerolm.shards import cache_budget

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:26 / {memory} rw,nosuid shared:13 - tmpfs tmpfs rw
31 30 8:2 / {memory}/with\\040disk rw - xfs /dev/sdb1 rw
"""


def test_a_path_is_in_memory_if_its_mount_is(tmp_path):
    mounts, memory = tmp_path / "mountinfo", tmp_path / "memory"
    mounts.write_text(MOUNTS.format(memory=memory))
    for path, found in (
        (memory, True), (memory / "a" / "b", True), (memory / "with disk" / "a", False),
        (tmp_path / "memory2", False),
    ):  # fmt: skip
        assert cache_budget._is_in_memory(path, mounts) == found, path
    assert not cache_budget._is_in_memory(memory, tmp_path / "absent")


@pytest.mark.parametrize("given", [None, "there"])
def test_a_cache_in_memory_must_be_named_explicitly(tmp_path, monkeypatch, given):
    monkeypatch.setattr(cache_budget, "_is_in_memory", lambda *_: True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = RunSettings(data_cache=given and str(tmp_path / given))
    directory = cache_budget.cache_directory(settings)
    problems = cache_budget._directory_problems(settings, directory, 1 << 20, ())
    assert len(problems) == (given is None) and all("(tmpfs)" in line for line in problems)
