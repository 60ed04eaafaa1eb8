"""`zerolm train`: the flags it splits, and real runs through DeepSpeed's launcher."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.command.train import deepspeed_command, run_command, split_flags
from tests import ROOT
from tests.launching import LLAMA, environment, free_port, run_module, write_json, write_shards
from zerolm.common.errors import ConfigError
from zerolm.engine.launcher_options import ALIASES, LAUNCHER_FLAGS, RANK_START, SHORT
from zerolm.parts.settings import FLAGS

NOT_OFFERED = {"module", "no_python", "no_local_rank", "autotuning"}  # they start something else
ZERO1 = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}


def test_the_launchers_flags_are_those_of_deepspeed(monkeypatch):
    """Each with its short form, and with a value or without; none is one of pretrain.py's."""
    from deepspeed.launcher import runner

    parsers = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda parser, **_: parsers.append(parser)
    )
    runner.parse_args([])
    switches, short, aliases = {}, {}, {}
    for action in parsers[0]._actions:
        long = [flag[2:] for flag in action.option_strings if flag.startswith("--")]
        if long and long[0] not in NOT_OFFERED | {"help"}:
            switches[long[0]] = action.nargs == 0
            aliases |= dict.fromkeys(long[1:], long[0])
            short |= {flag: f"--{long[0]}" for flag in action.option_strings if len(flag) == 2}
    theirs = {name: flag for name, flag in LAUNCHER_FLAGS.items() if name != RANK_START}
    assert switches == {name: not flag.metavar for name, flag in theirs.items()}
    assert (short, aliases) == (SHORT, ALIASES)
    assert not (set(LAUNCHER_FLAGS) | set(ALIASES)) & set(FLAGS)


def test_flags_are_split_wherever_they_stand():
    words = ["--num-gpus", "2", "--data", "a", "-H", "hosts", "--no_ssh", "--seed=1"]
    launcher, rest = split_flags([*words, "--launcher_args=--mem 5", "--num_accelerators=4"])
    assert rest == ["--data", "a", "--seed=1"]
    assert launcher == [
        "--num_gpus=2", "--hostfile=hosts", "--no_ssh", "--launcher_args=--mem 5", "--num_gpus=4"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--num_nodes needs a value"):
        split_flags(["--num_nodes"])


def test_open_mpi_is_told_where_ranks_meet_and_not_to_bind_them(tmp_path):
    (tmp_path / "hosts").write_text("node7 slots=2\nnode8 slots=2\n")
    flags = ["--launcher", "openmpi", "--hostfile", str(tmp_path / "hosts"), "--launcher_args"]
    expected = {
        "--mca a b": "--mca a b -x MASTER_ADDR=node7 -x MASTER_PORT=29500 --bind-to none",
        "-x MASTER_ADDR=a --bind-to core": "-x MASTER_ADDR=a --bind-to core",
        "--map-by ppr:1:node:PE=4": "--map-by ppr:1:node:PE=4 -x MASTER_ADDR=node7 "
        "-x MASTER_PORT=29500",
    }
    for own, complete in expected.items():
        assert f"--launcher_args={complete}" in deepspeed_command([*flags, own])


@pytest.mark.parametrize(
    "words", [["zerolm"], ["/opt/bin/zerolm"], ["python", "-m", "zerolm"], ["p", "-m", "launch"]]
)
def test_a_run_that_others_start_may_be_written_as_zerolm_train(words):
    flags = ["--num_gpus", "2", "--run_dir", "r"]
    arguments = argparse.Namespace(run_command=[*words, "train", *flags])
    assert run_command(arguments) == deepspeed_command(flags)
    assert run_command(argparse.Namespace(run_command=flags)) == flags
    assert run_command(argparse.Namespace(run_command=None)) == []


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    """The flags of a tiny run, without its run directory."""
    directory = tmp_path_factory.mktemp("train")
    model = write_json(directory / "model.json", LLAMA)
    profile = write_json(directory / "zero1.json", ZERO1)
    shards = write_shards(directory / "shards", 50)
    words = ["--model_config", model, "--deepspeed_config", profile, "--data", shards]
    words += ["--seq_len", 32, "--batch_tokens", 128, "--micro_batch_size", 2]
    return [str(word) for word in [*words, "--total_tokens", 256, "--log_interval", 1]]


@pytest.mark.soak  # always: that of ranks below, and of a run that succeeds in test_readme.py
def test_exit_codes_are_those_of_pretrain(inputs: list[str], tmp_path: Path):
    words = ["zerolm", "train", "--num_gpus", 1, "--master_port", free_port(), *inputs]
    words += ["--run_dir", tmp_path / "run", "--batch_tokens", 999]
    refused = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert refused.returncode == 2 and "batch_tokens" in refused.stderr + refused.stdout


def test_check_needs_no_launcher_and_counts_the_devices_of_its_flags(inputs, tmp_path):
    words = ["train", "--check", *inputs, "--run_dir", tmp_path / "run"]
    done = run_module("zerolm", *words, "--num_gpus", 2, "--num_nodes", 1)
    assert done.returncode == 0, done.stderr
    assert "2 x " in done.stdout and "launch" not in done.stdout
    assert not (tmp_path / "run").exists()
    refused = run_module("zerolm", *words, "--include", "localhost:0,1")
    assert refused.returncode == 2 and "Add --world_size N" in refused.stderr
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=4\ntwo slots=4\n")
    done = run_module("zerolm", *words, "--hostfile", hosts, "--no_ssh", "--exclude", "one@two:0,1")
    assert done.returncode == 0 and "2 x " in done.stdout, done.stderr


# A launcher, the launcher of its node, and a rank that saves and stops, as DeepSpeed starts them.
TREE = """
import signal, subprocess, sys, time
levels = int(sys.argv[1])
if levels:
    sys.exit(subprocess.call([sys.executable, __file__, str(levels - 1)]))
requests = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: requests.append(number))
print("training", flush=True)
while not requests:
    time.sleep(0.01)
time.sleep(0.3)
print("saved after", *requests, flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize(("number", "to_group"), [(2, True), (15, False)], ids=["Ctrl-C", "kill"])
def test_a_signal_reaches_the_ranks_only_and_the_exit_code_is_theirs(tmp_path, number, to_group):
    """A terminal sends Ctrl-C to its whole process group, `kill` to one process."""
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    command = [sys.executable, str(script), "2"]
    run = (
        f"import launch.command.train, sys; sys.exit(launch.command.train._run_launcher({command}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", run], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        (os.killpg if to_group else os.kill)(process.pid, number)
        output = process.communicate(timeout=60)[0]
    assert (process.returncode, output) == (75, f"saved after {number}\n")
