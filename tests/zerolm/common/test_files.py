"""Files that another host has written."""

import subprocess
import sys
import time

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


def test_a_directory_that_is_not_shared_is_noticed(tmp_path) -> None:
    start = time.monotonic()
    assert not files.wait_until_visible(tmp_path / "other host" / "run.json", seconds=0.2)
    assert 0.2 <= time.monotonic() - start < 5
