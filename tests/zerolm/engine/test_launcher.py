"""What DeepSpeed's launcher would run on other hosts: without files of the working directory."""

import sys

import pytest
from deepspeed.launcher import multinode_runner, runner

from zerolm.common.shipped import RUN_MODULE
from zerolm.engine import launcher


def test_other_hosts_get_neither_the_directory_nor_a_module_of_it(monkeypatch, tmp_path):
    commands = []
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1\nb slots=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.setattr(multinode_runner.PDSHRunner, "backend_exists", lambda self: True)
    monkeypatch.setattr(
        multinode_runner.MultiNodeRunner, "add_export", multinode_runner.MultiNodeRunner.add_export
    )
    monkeypatch.setattr(runner.subprocess, "Popen", runner.subprocess.Popen)

    class Recorded:
        returncode = 0

        def __init__(self, command, **options):
            commands.append(launcher.shielded(command))

        def wait(self):
            return 0

    monkeypatch.setattr(launcher, "ShieldedPopen", Recorded)
    handlers: list = []
    monkeypatch.setattr(runner.signal, "signal", lambda number, handler: handlers.append(handler))
    words = ["--hostfile", str(hosts), "--no_ssh_check", "--master_addr", "a", "pretrain.py"]
    monkeypatch.setattr(sys, "argv", ["deepspeed", *words])
    launcher.main()
    (command,) = commands
    text = " ".join(command)
    assert "export PYTHONPATH=/own; " in text and f"cd {tmp_path};" in text
    start = f"{sys.executable} -u {RUN_MODULE} {launcher.NODE_LAUNCHER} --world_info="
    assert start in text
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: None)
    Recorded.send_signal = lambda self, number: None
    with pytest.raises(SystemExit):
        handlers[0](15, None)
    pattern = commands[1][-1].replace("\\", "")
    assert pattern and pattern in start
