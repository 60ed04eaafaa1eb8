"""`.deepspeed_env`: read as DeepSpeed, pdsh and the shell of a host do together, or refused."""

import argparse
import os
import re
import subprocess

import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner

from zerolm.common.errors import ConfigError
from zerolm.engine.launcher_options import deepspeed_env_files

AS_WRITTEN = {  # {line: (name, value)}
    "A=1": ("A", "1"),
    " A = x  y ": ("A", "x  y"),
    "export A=/opt/lib:/usr/lib": ("A", "/opt/lib:/usr/lib"),
    "A=64(x2)": ("A", "64(x2)"),
    "A=": ("A", ""),
    "A=100%": ("A", "100%"),
    "A=/log/%p": ("A", "/log/%p"),
    "A=a=b;c&d|e<f>g*?[#~!": ("A", "a=b;c&d|e<f>g*?[#~!"),
    "A=it's": ("A", "it's"),
    "A=a\\b": ("A", "a\\b"),
    "A=ä ö": ("A", "ä ö"),
}
REFUSED = [
    "", " ", "# network", "A", "A 1", "#A=1", "A B=1", "1A=1", "A-B=1", "\ufeffA=1", 'A="x y"',
    "A='x y'",
    "A=$HOME/x", "A=`id`", "A=a\\\\b", "A=x y\\", "A=/log/%h", "A=%%", "A=\"", "A=a\0b",
]  # fmt: skip


class Runner(PDSHRunner):
    """DeepSpeed's, which does not count this environment's devices."""

    def __init__(self):
        arguments = argparse.Namespace(
            user_args=[], user_script="s", launcher_args="", ssh_port=None, master_addr="a",
            master_port=1, venv_script=None, no_python=False, module=False, no_local_rank=False,
            save_pid=False, enable_each_rank_log="",
        )  # fmt: skip
        super().__init__(arguments, "")


def on_the_host(path, name: str) -> str | None:
    """Return the value that a rank on another host gets, None if nothing is started there."""
    runner = Runner()
    try:
        with open(path) as file:
            for line in file.readlines():  # deepspeed/launcher/runner.py, main
                key, value = line.split("=", maxsplit=1)
                runner.add_export(key, value)
        exports = runner.get_cmd({}, {"node7": [0]})[0][6]
        exports = re.sub(
            "%[hun%]", lambda match: {"%h": "node7", "%%": "%"}.get(match[0], "0"), exports
        )
        command = f'{exports} printf "%s" "$(printenv {name}; echo .)"'
        shell = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20)
    except ValueError:
        return None
    return shell.stdout.removesuffix(".").removesuffix("\n") if shell.stdout else None


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", AS_WRITTEN)
def test_a_line_that_reaches_the_ranks_is_read_as_it_arrives(home, line):
    (home / ".deepspeed_env").write_text(f"{line}\n")
    name, value = AS_WRITTEN[line]
    assert deepspeed_env_files() == {home / ".deepspeed_env": {name: value}}
    assert on_the_host(home / ".deepspeed_env", name) == value


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_that_arrives_otherwise_or_ends_the_launcher_is_refused(home, line):
    (home / ".deepspeed_env").write_text(f"B=1\n{line}\nC='2'")
    with pytest.raises(ConfigError) as refused:
        deepspeed_env_files()
    first, second = refused.value.problems
    assert f"{home}/.deepspeed_env: line 2: " in first and "line 3: C: contains quotes" in second
    (home / ".deepspeed_env").write_text(f"{line}\n")
    written = line.partition("=")[2].strip("'")
    assert on_the_host(home / ".deepspeed_env", "A") != (written or line)


def test_the_files_and_their_order_are_those_of_the_launcher(home, monkeypatch):
    (home / "work").mkdir()
    monkeypatch.chdir(home / "work")
    (home / "hosts.env").write_bytes(b"A=1\r\nB=2")
    (home / "work" / "hosts.env").write_text("A=3\n")
    found = deepspeed_env_files({**os.environ, "DS_ENV_FILE": "hosts.env"})
    assert list(found.items()) == [
        (home / "hosts.env", {"A": "1", "B": "2"}), (home / "work/hosts.env", {"A": "3"})
    ]  # fmt: skip
    (home / "hosts.env").write_bytes(b"A=\xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        deepspeed_env_files({**os.environ, "DS_ENV_FILE": str(home / "hosts.env")})
