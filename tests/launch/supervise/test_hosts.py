"""Hostfiles: what is accepted is what DeepSpeed reads alike, and every other line is named."""

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from launch.supervise.hosts import read_hostfile
from zerolm.common.errors import ConfigError

BAD_LINES = {
    "zero slots": "a slots=0",
    "no number": "a slots=two",
    "no slots": "a",
    "negative": "a slots=-1",
    "two names": "a b slots=2",
    "unknown key": "a slots=2 gpus=2",
    "an option of ssh": "-oProxyCommand=reboot slots=2",
    "a byte order mark": "\ufeffa slots=2",
    "letters that look alike": "nodе1 slots=2",
    "digits of another script": "a slots=٣",
}


def test_lines_are_read_as_deepspeed_reads_them(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(
        b"# nodes\r\n\r\nnode1 slots=8\r\n  10.0.0.2\tslots=4 #x\nfe80::1 slots=2\nu@n slots=1"
    )
    ours = {host.name: host.num_slots for host in read_hostfile(path)}
    assert ours == {"node1": 8, "10.0.0.2": 4, "fe80::1": 2, "u@n": 1} == fetch_hostfile(path)


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_every_bad_line_is_named(tmp_path, line) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"good slots=1\n{line}\ngood slots=2\n")
    with pytest.raises(ConfigError) as refused:
        read_hostfile(path)
    first, second = refused.value.problems
    assert "line 2: " in first and "is not `name slots=N`" in first
    assert "line 3: " in second and "lists good again" in second


def test_a_file_that_is_no_text_is_refused(tmp_path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x00a slots=2\n")
    with pytest.raises(ConfigError, match="is not `name slots=N`"):
        read_hostfile(tmp_path / "hosts")
