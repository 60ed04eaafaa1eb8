"""Files that another host has written, and names that a power loss would take back."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faulty_files import FaultyFiles
from tests.launching import environment
from zerolm.common import files


def test_a_file_that_a_file_server_shows_late_is_waited_for(tmp_path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    faults = FaultyFiles(tmp_path, shared)
    faults.set(late_ms=1500)
    code = (
        "import pathlib, sys; from zerolm.common import files; path = pathlib.Path(sys.argv[1]);"
        "print('ready', flush=True); input();"
        "print(path.is_file(), files.wait_until_visible(path), path.is_file())"
    )
    path = shared / "run.json"
    with subprocess.Popen(
        [sys.executable, "-c", code, path], env=environment(**faults.variables), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        path.write_text("{}")
        output, _ = process.communicate("written\n", timeout=120)
    assert output.split() == ["False", "True", "True"]


def test_what_cannot_be_looked_up_is_an_error_and_not_absent(tmp_path) -> None:
    """`Path.exists` hides this error since Python 3.14."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for function in (files.exists, files.is_file, files.is_dir):
        with pytest.raises(OSError, match="too long"):
            function(tmp_path / ("x" * 300))
        absent = [tmp_path / "no", tmp_path / "file" / "below", tmp_path / "loop"]
        assert not any(map(function, absent))
    found = [[files.exists(each), files.is_file(each), files.is_dir(each)]
             for each in (tmp_path, tmp_path / "file")]  # fmt: skip
    assert found == [[True, False, True], [True, True, False]]


def test_a_directory_that_is_not_shared_is_noticed(tmp_path) -> None:
    start = time.monotonic()
    assert not files.wait_until_visible(tmp_path / "other host" / "run.json", seconds=0.2)
    assert time.monotonic() - start >= 0.2


@pytest.fixture
def synced(monkeypatch) -> list[Path]:
    """The paths that are synced, in their order."""
    found: list[Path] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        found.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return found


def test_the_names_of_new_directories_are_durable(tmp_path, synced) -> None:
    files.make_directories(tmp_path / "a" / "b" / "c")
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    files.make_directories(tmp_path / "a" / "b")
    assert not synced


def test_a_tree_is_synced_with_all_files_and_names(tmp_path, synced) -> None:
    deep = tmp_path / "tree" / "deep"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (deep / "link").symlink_to("absent")
    files.sync_tree(tmp_path / "tree")
    assert set(synced) == {tmp_path / "tree", deep, deep / "file"}
