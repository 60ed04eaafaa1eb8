"""Directories among the temporary files: used if they are this user's alone, else refused."""

import hashlib
import os

import pytest

from zerolm import data_cache, store_copies
from zerolm.block_cache import BlockCache, Cache, claim
from zerolm.errors import ShardReadError
from zerolm.own_directory import make_own, own_directory, own_problem
from zerolm.settings import Settings

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
    directory = own_directory(name)
    planted(directory)
    if planted is as_foreign:
        real = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: real + 1)
        monkeypatch.setattr("zerolm.own_directory.own_directory", lambda name: directory)
        monkeypatch.setattr(data_cache, "own_directory", lambda name: directory)
        monkeypatch.setattr(store_copies, "own_directory", lambda name: directory)
    with pytest.raises(PermissionError, match=r"link to one|others|another user"):
        make_own(directory)
    if name == "data-cache":
        found = data_cache._room_problems(Settings(), directory, 1 << 16, ())
        assert len(found) == 1 and "cannot be trusted" in found[0]
        return
    with pytest.raises(ShardReadError, match="no tokenizer can be copied there"):
        store_copies.tokenizer([ENTRY], lambda entry: b"{}")
    digest = hashlib.sha256(b"ends").hexdigest()
    assert store_copies.index(digest, lambda: b"ends") == b"ends"  # and nothing is kept
    assert not directory.is_dir() or not list(directory.iterdir())


def test_what_is_made_is_this_users_alone(temporary):
    before = os.umask(0)
    try:
        claim(Cache(own_directory("data-cache") / f"{0:016x}-16", 16)).close()
        made = store_copies.tokenizer([ENTRY], lambda entry: b"{}")
    finally:
        os.umask(before)
    assert (made / "tokenizer.json").read_bytes() == b"{}"
    for directory in (made, made.parent, own_directory("data-cache")):
        assert directory.stat().st_mode & 0o777 == 0o700 and own_problem(directory) is None


def test_a_link_in_the_place_of_a_cache_is_not_written_through(temporary):
    (temporary / "precious").write_text("mine")
    cache = own_directory("data-cache") / f"{0:016x}-16"
    make_own(cache)
    (cache / "blocks").symlink_to(temporary / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        BlockCache(cache, 16, 16)
    assert (temporary / "precious").read_text() == "mine"


def test_the_indexes_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(store_copies, "MOST_INDEXES", 2)
    contents = [bytes([number]) * 8 for number in range(3)]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    fetched = []

    def read(number, seconds):
        fetch = lambda: fetched.append(number) or contents[number]  # noqa: E731
        assert store_copies.index(digests[number], fetch) == contents[number]
        os.utime(own_directory("copies") / f"{digests[number]}.idx", (seconds, seconds))

    for seconds, number in enumerate([0, 0, 1, 0, 2, 0, 1]):
        read(number, seconds)
    assert fetched == [0, 1, 2, 1]
    (own_directory("copies") / f"{digests[1]}.idx").write_bytes(b"damaged")
    read(1, 9)
    assert fetched == [0, 1, 2, 1, 1]
