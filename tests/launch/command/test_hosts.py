"""Hostfiles, variables and arguments: accepted is what DeepSpeed passes on alike."""

import argparse
import base64
import json
import re
import subprocess

import pytest
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.launcher import runner
from deepspeed.launcher.multinode_runner import PDSHRunner, SlurmRunner
from deepspeed.launcher.runner import EXPORT_ENVS, fetch_hostfile

from launch.command.environment import environment_problems, forwarded_environment
from launch.command.hosts import (
    KEEP_ALIVE,
    VISIBLE_DEVICES,
    keep_alive,
    read_hostfile,
    ssh_problems,
    started_slots,
    visible_devices,
)
from launch.command.train import run as train
from zerolm.common.errors import ConfigError
from zerolm.engine.launcher_options import FORWARDED_PREFIXES

BAD_LINES = {
    "zero slots": "a slots=0",
    "no number": "a slots=two",
    "no slots": "a",
    "negative": "a slots=-1",
    "two names": "a b slots=2",
    "unknown key": "a slots=2 gpus=2",
    "another order": "a max_slots=2 slots=2",
    "an option of ssh": "-oProxyCommand=reboot slots=2",
    "a byte order mark": "\ufeffa slots=2",
    "letters that look alike": "nodе1 slots=2",
    "digits of another script": "a slots=٣",
}


def test_lines_are_read_as_deepspeed_reads_them(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(
        b"# nodes\r\n\r\nnode1 slots=8\r\n  10.0.0.2\tslots=4 #x\nfe80::1 slots=2\nu@n slots=1"
        b" max_slots=2\r\n"
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
    with pytest.raises(ConfigError, match="absent: cannot be read"):
        read_hostfile(tmp_path / "absent")


KEPT = [
    "--data", "s3://a/b=0.5", "--wandb_tags", "a,b", "x y (z)", "1B:web=1,code=2", "a~b#c!", "ä",
    "5%",
]  # fmt: skip
CHANGED = [
    "", "a&b", "$HOME", "~/x", "#x", "a b $HOME", "it's", 'a"b', "a b\\", "*", "{a,b}", "%h", "(x)",
    "`id`",
]  # fmt: skip


@pytest.mark.parametrize("argument", [*KEPT, *CHANGED])
def test_an_argument_that_the_shell_of_a_host_changes_is_named(argument, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    runner = object.__new__(PDSHRunner)
    runner.args = argparse.Namespace(user_args=[argument])
    (sent,) = runner.parse_user_args()
    command = f"set -- {sent.replace('%h', 'node7')}; printf '[%s]' \"$@\" $#"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=20, cwd="/"
    )
    is_kept = done.stdout == f"[{argument}][1]" and argument != "{a,b}"
    assert is_kept == (argument in KEPT)
    problems = ssh_problems([argument])
    assert bool(problems) == (argument in CHANGED)
    assert not ssh_problems([argument], launcher="slurm")


def test_the_doctors_environment_is_that_of_the_ranks(monkeypatch, tmp_path) -> None:
    assert set(FORWARDED_PREFIXES) == {*EXPORT_ENVS, *CUDA_Accelerator.export_envs(None)}
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": str(tmp_path), "NCCL_IB_PKEY": "7", "PYTHONPATH": "/a"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".deepspeed_env").write_text("TOKENIZERS_PARALLELISM=false\nHF_TOKEN_PATH=/b\n")
    forwarded = forwarded_environment()
    expected = {"NCCL_IB_PKEY": "7", "TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/b"}
    assert forwarded.items() >= {**expected, "PYTHONPATH": "/a"}.items()
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/log/%h")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret-value")
    (tmp_path / ".deepspeed_env").write_text("AWS_ACCESS_KEY_ID=secret-value\nA='1'\n")
    assert not any(line.startswith("environment") for line in environment_problems(1))
    text = "\n".join(environment_problems(2))
    assert "environment: NCCL_DEBUG_FILE: contains '%h'" in text
    assert "line 2: A: contains quotes" in text
    assert "environment: MLFLOW_TRACKING_TOKEN: would be visible" in text
    assert "secret-value" not in text


def test_train_counts_the_hosts_and_reads_the_variables_before_it_starts(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("# none\n")
    for flags, expected in {
        ("--num_nodes=3",): "hosts: 2 host(s), --num_nodes is 3",
        (): ".deepspeed_env: line 1: not NAME=VALUE",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(expected)):
            train(["--hostfile", "hosts", *flags])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, KEEP_ALIVE),
        ({"PDSH_SSH_ARGS_APPEND": "-i key"}, f"-i key {KEEP_ALIVE}"),
        ({"PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=5"}, "-o ServerAliveInterval=5"),
    ],
)
def test_ssh_ends_a_dead_connection_unless_the_user_has_said_when(given, expected) -> None:
    keep_alive(given)
    assert given["PDSH_SSH_ARGS_APPEND"] == expected


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"include": "b"},
        {"include": "a:0,2@b:1"},
        {"exclude": "a:0,2@b"},
        {"num_nodes": "1"},
        {"num_gpus": "3"},
        {"num_nodes": "2", "num_gpus": "1"},
    ],
)
def test_ranks_are_counted_as_deepspeeds_runner_counts_them(given) -> None:
    slots = {"a": 4, "b": 2, "c": 3}
    found = runner.parse_inclusion_exclusion(
        slots, given.get("include", ""), given.get("exclude", "")
    )
    numbers = [int(given.get(name, -1)) for name in ("num_nodes", "num_gpus")]
    found = runner.apply_num_nodes_and_gpus(found, *numbers)
    expected = {host: len(devices) for host, devices in found.items()}
    assert started_slots(slots, given) == expected
    try:
        SlurmRunner.validate_active_resources(found)
    except ValueError:  # srun places ranks by count
        return
    arguments = runner.parse_args([*(f"--{name}={given[name]}" for name in given), "pretrain.py"])
    command = SlurmRunner(arguments, "", slots).get_cmd({}, found)
    assert command[1:3] == ["-n", str(sum(expected.values()))]


@pytest.mark.parametrize(
    ("visible", "given"),
    [
        ("", {}),
        ("2,3", {}),
        ("1,1,0", {}),
        ("2", {"num_gpus": "3"}),
        ("2", {"exclude": "localhost:0"}),
        ("2,3", {"include": "localhost:0"}),
        ("GPU-12", {}),
        ("GPU-12", {"num_gpus": "1"}),
        ("-1", {}),
        ("2", {"num_nodes": "1"}),
    ],
)
def test_devices_of_this_host_are_those_that_deepspeed_takes_from_the_environment(
    visible, given, monkeypatch
) -> None:
    """`deepspeed` itself is started up to where it would start its node launcher."""
    started: list[list[str]] = []
    monkeypatch.setenv(VISIBLE_DEVICES, visible)
    monkeypatch.setattr(CUDA_Accelerator, "device_count", lambda self: 4)
    monkeypatch.setattr(runner, "get_accelerator", CUDA_Accelerator)
    monkeypatch.setattr(runner.subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    flags = [f"--{name}={value}" for name, value in given.items()]
    try:
        expected_devices = visible_devices(given)
    except ConfigError as error:
        assert f"environment: CUDA_VISIBLE_DEVICES: {visible}" in error.problems[0]
        with pytest.raises(ValueError):
            runner.main([*flags, "--hostfile", "/nowhere", "pretrain.py"])
        return
    with pytest.raises(AttributeError):  # of the process that has not been started
        runner.main([*flags, "--hostfile", "/nowhere", "pretrain.py"])
    [command] = started
    [world] = [word.partition("=")[2] for word in command if word.startswith("--world_info")]
    devices = json.loads(base64.urlsafe_b64decode(world))["localhost"]
    number = started_slots({"localhost": len(expected_devices) or 4}, given)["localhost"]
    assert len(devices) == number
    assert not expected_devices or devices == sorted(map(int, expected_devices))
