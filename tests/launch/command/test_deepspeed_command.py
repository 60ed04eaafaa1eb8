"""The arguments of a `deepspeed ... pretrain.py ...` command."""

import json
from pathlib import Path

import pytest

from launch.command.deepspeed_command import launcher_option, run_directory, with_launcher_option
from zerolm.common.errors import ConfigError


def test_the_run_directory_is_read_from_the_command(tmp_path) -> None:
    settings = tmp_path / "run.json"
    settings.write_text(json.dumps({"settings": {"run_dir": "runs/b"}}))
    assert run_directory(["deepspeed", "pretrain.py", "--run-dir=runs/a"]) == Path("runs/a")
    assert run_directory(["x/pretrain.py", "--settings", str(settings)]) == Path("runs/b")
    for wrong in (["deepspeed", "train.py"], ["deepspeed", "pretrain.py", "--seed", "1"]):
        with pytest.raises(ConfigError):
            run_directory(wrong)


def test_only_options_of_the_launcher_are_read_and_replaced() -> None:
    command = ["deepspeed", "--hostfile=h", "--num_nodes", "2", "pretrain.py", "--num_nodes", "9"]
    assert launcher_option(command, "--hostfile") == "h"
    assert launcher_option(command, "--include") is None
    assert with_launcher_option(command, "--num_nodes", "1")[3] == "1"
    assert with_launcher_option(command, "--num_nodes", "1")[-1] == "9"
    assert with_launcher_option(command, "--hostfile", "g")[1] == "--hostfile=g"
