"""Values that are kept between processes: never another value, whatever happens to their files."""

import os
import threading

import pytest

from zerolm.common import remembered


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(remembered.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def recalled(inputs, value, name="value"):
    """Return what is recalled, and whether it had to be computed."""
    calls = []
    with remembered.opened():
        found = remembered.recall(name, inputs, lambda: calls.append(1) or value)
    return found, bool(calls)


def test_a_value_is_computed_once_for_each_name_and_inputs(directory):
    assert recalled([1], {"a": [1.5, None]}) == ({"a": [1.5, None]}, True)
    assert recalled([1], "another") == ({"a": [1.5, None]}, False)
    assert recalled([2], "of 2") == ("of 2", True)
    assert recalled({"a": 1, "b": 2}, "a first") == ("a first", True)
    assert recalled({"b": 2, "a": 1}, "b first") == ("b first", True)
    assert recalled([1], "of another name", name="other") == ("of another name", True)
    assert remembered.recall("value", [1], lambda: "not open") == "not open"
    assert directory.stat().st_mode & 0o777 == 0o700


def test_another_version_of_the_code_or_a_package_forgets(directory, monkeypatch):
    recalled([1], "old")
    monkeypatch.setattr(remembered, "code_digest", lambda: "newer")
    assert recalled([1], "new") == ("new", True)


@pytest.mark.parametrize("content", [b"", b"\n", b"0" * 64 + b"\n1\n", b"\xff\xfe", None])
def test_a_damaged_file_is_ignored_and_replaced(content, directory):
    recalled([1], "right")
    [file] = directory.iterdir()
    file.write_bytes(file.read_bytes().replace(b"right", b"wrong") if content is None else content)
    assert recalled([1], "again") == ("again", True)
    assert recalled([1], "unused") == ("again", False)


def test_without_a_directory_values_are_computed(tmp_path, monkeypatch):
    for text in ("off", ""):
        monkeypatch.setenv(remembered.VARIABLE, text)
        assert recalled([1], "value") == recalled([1], "value") == ("value", True)
    (tmp_path / "file").touch()
    monkeypatch.setenv(remembered.VARIABLE, str(tmp_path / "file"))
    assert recalled([1], "value") == recalled([1], "value") == ("value", True)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # others could write what this user would recall
    monkeypatch.setenv(remembered.VARIABLE, str(shared))
    assert recalled([1], "value") == recalled([1], "value") == ("value", True)
    assert not list(shared.iterdir())
    assert remembered.cache_directory({"HOME": "/h"}).as_posix() == "/h/.cache/zerolm"
    assert remembered.cache_directory({"XDG_CACHE_HOME": "/c"}).as_posix() == "/c/zerolm"
    assert remembered.cache_directory({}).as_posix() == "/.cache/zerolm"


def test_what_json_cannot_hold_is_computed(directory):
    assert recalled([1], {1, 2}) == recalled([1], {1, 2}) == ({1, 2}, True)
    assert recalled([object()], "value") == ("value", True)
    assert recalled([4], {1: "one"}) == recalled([4], {1: "one"}) == ({1: "one"}, True)
    with pytest.raises(ZeroDivisionError), remembered.opened():
        remembered.recall("value", [3], lambda: 1 // 0)


def test_values_are_complete_while_others_write_them(directory):
    def work():
        for number in range(50):
            with remembered.opened():
                value = ["x" * 5000, number % 5]
                assert remembered.recall("value", [number % 5], lambda value=value: value) == value

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(list(directory.iterdir())) == 5


def test_the_oldest_are_forgotten(directory, monkeypatch):
    monkeypatch.setattr(remembered, "MAX_FILES", 4)
    monkeypatch.setattr(remembered, "KEPT_FILES", 2)
    for number in range(5):
        recalled([number], number)
        for file in directory.iterdir():
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 10))
    assert len(list(directory.iterdir())) == 2
    assert recalled([4], None) == (4, False)
