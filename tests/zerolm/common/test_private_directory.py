"""Directories among the temporary files: used if they are this user's alone, else refused."""

import hashlib
import os

import pytest

from zerolm.common.errors import ShardReadError
from zerolm.common.files import make_private, privacy_problem, private_directory
from zerolm.parts.settings import RunSettings
from zerolm.shards import cache_budget, local_copies
from zerolm.shards.block_cache import BlockCache, Cache, lock_cache

ENTRY = {"file": "tokenizer.json", "sha256": hashlib.sha256(b"{}").hexdigest()}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The directory for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def as_link(path):
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def as_writable(path):
    path.mkdir()
    path.chmod(0o777)


def as_file(path):
    path.write_text("")


def as_foreign(path):
    """Another user's: seen from here, this process is somebody else from now on."""
    path.mkdir()


@pytest.mark.parametrize("planted", [as_link, as_writable, as_file, as_foreign])
@pytest.mark.parametrize("name", ["data-cache", "copies"])
def test_what_somebody_else_has_planted_is_refused(monkeypatch, planted, name):
    directory = private_directory(name)
    planted(directory)
    if planted is as_foreign:
        real = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: real + 1)
        monkeypatch.setattr("zerolm.common.files.private_directory", lambda name: directory)
        monkeypatch.setattr(cache_budget, "private_directory", lambda name: directory)
        monkeypatch.setattr(local_copies, "private_directory", lambda name: directory)
    with pytest.raises(PermissionError, match=r"symbolic link|other users|another user"):
        make_private(directory)
    if name == "data-cache":
        found = cache_budget._directory_problems(RunSettings(), directory, 1 << 16, ())
        assert len(found) == 1 and "cannot be trusted" in found[0]
        return
    with pytest.raises(ShardReadError, match="no tokenizer can be copied there"):
        local_copies.tokenizer_directory([ENTRY], lambda entry: b"{}")
    digest = hashlib.sha256(b"ends").hexdigest()
    assert local_copies.index_content(digest, lambda: b"ends") == b"ends"  # and nothing is kept
    assert not directory.is_dir() or not list(directory.iterdir())


def test_what_is_made_is_this_users_alone(temporary):
    before = os.umask(0)
    try:
        lock_cache(Cache(private_directory("data-cache") / f"{0:016x}-16", 16)).release()
        made = local_copies.tokenizer_directory([ENTRY], lambda entry: b"{}")
    finally:
        os.umask(before)
    assert (made / "tokenizer.json").read_bytes() == b"{}"
    for directory in (made, made.parent, private_directory("data-cache")):
        assert directory.stat().st_mode & 0o777 == 0o700 and privacy_problem(directory) is None


def test_a_link_in_the_place_of_a_cache_is_not_written_through(temporary):
    (temporary / "precious").write_text("mine")
    cache = private_directory("data-cache") / f"{0:016x}-16"
    make_private(cache)
    (cache / "blocks").symlink_to(temporary / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        BlockCache(cache, 16, 16)
    assert (temporary / "precious").read_text() == "mine"


def test_the_indexes_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(local_copies, "MAX_INDEXES", 2)
    contents = [bytes([number]) * 8 for number in range(3)]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    fetched = []

    def read(number, seconds):
        fetch = lambda: fetched.append(number) or contents[number]  # noqa: E731
        assert local_copies.index_content(digests[number], fetch) == contents[number]
        os.utime(private_directory("copies") / f"{digests[number]}.idx", (seconds, seconds))

    for seconds, number in enumerate([0, 0, 1, 0, 2, 0, 1]):
        read(number, seconds)
    assert fetched == [0, 1, 2, 1]
    (private_directory("copies") / f"{digests[1]}.idx").write_bytes(b"damaged")
    read(1, 9)
    assert fetched == [0, 1, 2, 1, 1]
