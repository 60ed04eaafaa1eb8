"""The runner: DeepSpeed's own code without torch, which starts zerolm's node launchers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from zerolm.common.errors import ConfigError
from zerolm.common.process_tree import DEEPSPEED_NODE_LAUNCHER, NODE_LAUNCHER
from zerolm.common.shipped import RUN_MODULE
from zerolm.engine import deepspeed_launcher, launcher
from zerolm.engine.launcher_options import AUTO, DEEPSPEED, FORK, FRESH, rank_start

# Runs DeepSpeed's runner, imported with torch or without, for each command line; prints for each
# the command that it would start, or its error.
COMMANDS = """
import contextlib, io, json, subprocess, sys, types
from zerolm.engine import deepspeed_launcher
real, cases = sys.argv[1] == "real", json.loads(sys.argv[2])
if real:
    import deepspeed
    from deepspeed.launcher import runner
else:
    runner = deepspeed_launcher.load("runner")
class Started:
    returncode = 0
    def __init__(self, command, env):
        kept = ("CUDA", "PYTHON", "PDSH", "NCCL")
        self.__class__.seen = command, {k: v for k, v in env.items() if k.startswith(kept)}
    def wait(self):
        return 0
class Signal:
    SIGINT = SIGTERM = signal = staticmethod(lambda *_: None)
runner.signal = Signal
names = vars(subprocess) | {"Popen": Started, "check_output": lambda *_: b"10.0.0.1 "}
runner.subprocess = types.SimpleNamespace(**names)
for variables, argv in cases:
    runner.os.environ.update(variables)
    output = io.StringIO()
    try:
        Started.seen = None
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            runner.main(argv)
        found = Started.seen
    except (Exception, SystemExit) as error:
        found = type(error).__name__, str(error)
    for name in variables:
        runner.os.environ.pop(name, None)
    shown = [line for line in output.getvalue().splitlines() if not line.startswith("[")]
    print(json.dumps([found, shown]))
print("torch" in sys.modules)
"""
WORDS = ["s.py", "--a", "b c"]
FLAGS = [
    ["--num_gpus", "2"], ["--num_accelerators=3"], ["--num_gpus=0"], ["--num_gpus=x"],
    ["--include", "localhost:0"], ["-i", "localhost:0,1"], ["-e", "localhost:0"], ["-e", "other"],
    ["--include", "localhost", "--num_gpus", "2"], ["-i", "a", "-e", "b"], ["--num_nodes", "2"],
    ["--master_port", "1", "--master_addr", "a"], ["--module"], ["--no_python"],
    ["--no_local_rank"], ["--enable_each_rank_log", "logs"], ["--bind_cores_to_rank"],
    ["--bind_core_list", "0-1"], ["--log_level", "debug"], ["--log_level", "loud"], ["-q"],
    ["--no_ssh"], ["--no_ssh", "--node_rank", "0"], ["--force_multi"], ["--unknown"], ["--help"],
    ["--launcher", "openmpi"], ["-H", "HOSTS", "--no_ssh", "--node_rank", "1"],
]  # fmt: skip
ON_HOSTS = [
    [], ["--num_nodes", "1"], ["--num_nodes", "3"], ["--num_gpus", "1"], ["-i", "a"],
    ["-i", "a:1@b"], ["-e", "b:0"], ["-e", "a@b"], ["-i", "c"], ["-i", "a:7"], ["--ssh_port", "7"],
    ["--module"], ["--no_python"], ["--no_local_rank"], ["--enable_each_rank_log", "logs"],
    ["--launcher_args", "-u 5"], ["--venv_script", "v"], ["--launcher", "openmpi"],
    ["--launcher", "slurm"], ["--launcher", "slurm", "--num_nodes", "2"], ["--launcher", "impi"],
    ["--launcher", "mpich"], ["--launcher", "mvapich"], ["--launcher", "none"],
    ["--force_multi", "--num_nodes", "1"], ["--master_addr", "a", "--master_port", "5"],
]  # fmt: skip
HOSTFILES = ["# one\na slots=2\n\nb slots=2\n", "a slots=2\na slots=1\n", "a\n", "# none\n"]
VARIABLES = [
    {}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"LOCAL_SIZE": "3"}, {"NCCL_DEBUG": "INFO"},
    {"DS_ACCELERATOR": "cpu"},
]  # fmt: skip


def results(kind: str, cases: list, directory: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, kind, json.dumps(cases)], cwd=directory, text=True,
        capture_output=True, timeout=240, check=True,
        env={**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if not line.startswith("[2")]  # not the log


def test_commands_and_errors_are_deepspeeds_own_for_all_flags(tmp_path):
    for name in ("pdsh", "ompi_info", "mpirun", "sinfo", "ssh"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    cases = [[variables, [*flags, *WORDS]] for variables in VARIABLES for flags in FLAGS]
    for number, content in enumerate(HOSTFILES):
        file = tmp_path / f"hosts{number}"
        file.write_text(content)
        flags = ["--no_ssh_check", "--hostfile", str(file)]
        cases += [[{}, [*flags, *each, *WORDS]] for each in ON_HOSTS]
    cases = json.loads(json.dumps(cases).replace("HOSTS", str(tmp_path / "hosts0")))
    *theirs, with_torch = results("real", cases, tmp_path)
    *ours, without = results("light", cases, tmp_path)
    assert (with_torch, without) == ("True", "False")
    assert len(ours) == len(theirs) == len(cases) > 200
    assert not [each for each in zip(cases, theirs, ours, strict=True) if each[1] != each[2]]
    started = [json.loads(line)[0] for line in ours]
    assert sum(isinstance(each[0], list) for each in started) > 60


def test_the_node_launcher_and_the_pattern_that_ends_it_are_replaced():
    runner = deepspeed_launcher.load("multinode_runner")
    names = {
        "user_args": [], "user_script": "s", "launcher_args": "", "ssh_port": None,
        "master_addr": "a", "master_port": 1, "venv_script": None, "no_python": False,
        "module": False, "no_local_rank": False, "save_pid": False, "enable_each_rank_log": "",
    }  # fmt: skip
    made = runner.PDSHRunner(type("Arguments", (), names), "info")
    command, ending, _ = made.get_cmd({}, {"a": [0]})
    for start, module in ((AUTO, NODE_LAUNCHER), (DEEPSPEED, DEEPSPEED_NODE_LAUNCHER)):
        text = " ".join(launcher.node_command(command, start))
        flag = "" if start == DEEPSPEED else f"--rank_start={start} "
        assert f"{sys.executable} -u {RUN_MODULE} {module} {flag}--world_info=info" in text
        pattern = launcher.node_command(ending, start)[-1].replace("\\", "")
        assert pattern.endswith(module[:-1]) and pattern in text


def test_other_hosts_do_not_get_the_working_directory(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1\nb slots=1\n")
    (tmp_path / "pdsh").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pdsh").chmod(0o755)
    words = ["--hostfile", hosts, "--no_ssh_check", "--master_addr", "a", "-q", "pretrain.py"]
    done = subprocess.run(
        [sys.executable, RUN_MODULE, "zerolm.engine.launcher", *words], cwd=tmp_path, text=True,
        capture_output=True, check=True, timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": "/own"},
    )  # fmt: skip
    (exported,) = [each for each in done.stdout.split(";") if "export PYTHONPATH=" in each]
    assert exported.endswith(":/own") and str(tmp_path) not in exported
    assert f"cd {tmp_path};" in done.stdout and f"{RUN_MODULE} {NODE_LAUNCHER}" in done.stdout


def test_the_flag_for_the_start_of_ranks_is_taken_from_in_front_of_the_script_only():
    assert rank_start(["--rank_start=fork", "-q", "s.py"]) == (FORK, ["-q", "s.py"])
    assert rank_start(["-q", "--rank-start", "fresh", "s.py"]) == (FRESH, ["-q", "s.py"])
    assert rank_start(["s.py", "--rank_start=fork"]) == (AUTO, ["s.py", "--rank_start=fork"])
    with pytest.raises(ConfigError, match="--rank_start: 'cold' is none of auto, fork, fresh and"):
        rank_start(["--rank_start", "cold", "s.py"])
