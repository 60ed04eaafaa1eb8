"""Render a `Job` as a scheduler's job file: Slurm, Kubernetes JobSet or TrainJob, SkyPilot.

Each file starts `python -m launch node` on every node with the same flags of pretrain.py, and
restarts a run that ends with exit code 75. No side effects.
"""

import shlex
from dataclasses import dataclass
from typing import Any

from zerolm.common.errors import EXIT_GAVE_UP, EXIT_REFUSED, EXIT_STOPPED


@dataclass(frozen=True)
class Job:
    """The content of a job file, whichever its format.

    Attributes:
        nodes, devices: number of nodes, and of ranks on each.
        flags: flags of pretrain.py.
        directory: path of this project on the nodes, the same on each.
        python: interpreter: a path relative to `directory`, or a program's name.
        environment: {variable: value}.
        secrets: names of variables whose values the scheduler supplies.
        time_seconds: time limit of the job (Slurm).
        save_seconds: time to save and stop: before the time limit (Slurm), or after SIGTERM
            (Kubernetes).
        volume, mount_path: volume that all nodes share, and where it is mounted.
        secret_name: Kubernetes Secret that holds the values of `secrets`.
        device_resource: the cluster's resource name of a device (Kubernetes).
        slurm: additional `#SBATCH` options.
    """

    name: str
    nodes: int
    devices: int
    flags: list[str]
    directory: str
    python: str
    master_port: int
    environment: dict[str, str]
    secrets: list[str]
    time_seconds: float
    save_seconds: float
    max_restarts: int
    image: str | None
    volume: str | None
    mount_path: str
    secret_name: str
    device_resource: str
    accelerator: str | None
    slurm: list[str]

    def node_command(self, master: str) -> list[str]:
        """Return the argv that each node runs, not quoted for a shell."""
        argv = [self.python, "-m", "launch", "node", "--nodes", str(self.nodes)]
        argv += ["--devices_per_node", str(self.devices), "--master_addr", master]
        argv += ["--master_port", str(self.master_port), "--", "pretrain.py"]
        return argv + self.flags

    def node_shell_command(self) -> str:
        """Return the command that each node runs, for a shell whose `$master` is the address."""
        argv = [shlex.quote(argument) for argument in self.node_command("MASTER")]
        argv[argv.index("MASTER")] = '"$master"'
        return " ".join(argv)


# -------------------------------------------------------------------------------------------------
# Slurm


def slurm_script(job: Job) -> str:
    """Return an sbatch script: the supervisor on the first node, one task on each node.

    Because of `exec` the supervisor is the process that receives `--signal`. It forwards the signal
    to the ranks of its node, and all ranks save together. With `--requeue` the supervisor requeues
    the job.
    """
    minutes = int(job.time_seconds // 60)
    # By default Slurm gives a task one core, and the memory of one core.
    own = ("--exclusive", "--cpus-per-", "-c", "--mem")
    shares_nodes = any(option.startswith(own) for option in job.slurm)
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={job.devices}",
        f"#SBATCH --time={minutes}",
        f"#SBATCH --signal=B:USR1@{job.save_seconds:.0f}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={job.name}-%j.log",
        *([] if shares_nodes else ["#SBATCH --exclusive", "#SBATCH --mem=0"]),
        *(f"#SBATCH {option}" for option in job.slurm),
        "",
        "# The time is in minutes. USR1 comes before its end: the ranks save and stop with exit",
        f"# code {EXIT_STOPPED}, and the job is requeued. srun forwards the environment to every",
        "# node, so no value is on a command line. srun does not take --cpus-per-task from sbatch.",
        "set -euo pipefail",
        f"cd {shlex.quote(job.directory)}",
    ]
    for name in job.secrets:
        lines.append(f': "${{{name}:?set it in the shell that calls sbatch}}"')
    for name, value in job.environment.items():
        lines.append(f"export {name}={shlex.quote(value)}")
    task = f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
    lines += [
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"',
        'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        f"exec {shlex.quote(job.python)} -m launch supervise --requeue -- \\",
        f"    {task} --kill-on-bad-exit=1 \\",
        f"    {job.node_shell_command()}",
    ]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------
# Kubernetes


def environment_entries(job: Job) -> list[dict[str, Any]]:
    """Return a container's `env`: plain values, and references to keys of a Secret."""
    entries: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in job.environment.items()
    ]
    for name in job.secrets:
        reference = {"secretKeyRef": {"name": job.secret_name, "key": name}}
        entries.append({"name": name, "valueFrom": reference})
    return entries


def volumes_and_mounts(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (volumes, volumeMounts): shared memory for NCCL and loader workers, and the claim."""
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.volume:
        claim = {"claimName": job.volume}
        volumes.append({"name": "shared", "persistentVolumeClaim": claim})
        mounts.append({"name": "shared", "mountPath": job.mount_path})
    return volumes, mounts


def kubernetes_command(job: Job) -> list[str]:
    """Return the argv of each node, escaped: Kubernetes would expand `$(NAME)` in it.

    The master's address is the name that JobSet gives the first pod, also in a TrainJob.
    """
    argv = job.node_command(f"{job.name}-node-0-0.{job.name}")
    return [argument.replace("$(", "$$(") for argument in argv]


def jobset(job: Job) -> str:
    """Return a JobSet (v1alpha2): one indexed Job whose pods are the nodes.

    Any failure restarts all pods, except for the exit codes after which a restart would not help.
    """
    volumes, mounts = volumes_and_mounts(job)
    container = {
        "name": "node",
        "image": job.image,
        "workingDir": job.directory,
        "command": kubernetes_command(job),
        "env": environment_entries(job),
        "resources": {"limits": {job.device_resource: job.devices}},
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.save_seconds),
        "containers": [container],
        "volumes": volumes,
    }
    final_codes = {"operator": "In", "values": [EXIT_REFUSED, EXIT_GAVE_UP]}
    nodes = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final_codes}]},
        "template": {"spec": pod},
    }
    rule = {
        "name": "finalExitCode",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [rule]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}],
    }
    header = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return _yaml({**header, "metadata": {"name": job.name}, "spec": spec})


def trainjob(job: Job) -> str:
    """Return a TrainJob (v1alpha1, Kubeflow Trainer 2.2 or newer) on the torch runtime.

    The number of restarts is set by the runtime's failure policy, not here.
    """
    volumes, mounts = volumes_and_mounts(job)
    pod = {
        "terminationGracePeriodSeconds": int(job.save_seconds),
        "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    # A TrainJob has no working directory of its own.
    change_directory = f'cd {shlex.quote(job.directory)} && exec "$@"'
    spec = {
        "runtimeRef": {"name": "torch-distributed", "kind": "ClusterTrainingRuntime"},
        "trainer": {
            "image": job.image,
            "numNodes": job.nodes,
            "command": ["sh", "-c", change_directory, "node"],
            "args": kubernetes_command(job),
            "env": environment_entries(job),
            "resourcesPerNode": {"limits": {job.device_resource: job.devices}},
        },
        "runtimePatches": [{"manager": "zerolm.io/render", "trainingRuntimeSpec": patch}],
    }
    header = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return _yaml({**header, "metadata": {"name": job.name}, "spec": spec})


# -------------------------------------------------------------------------------------------------
# SkyPilot


def skypilot_task(job: Job) -> str:
    """Return a task for `sky jobs launch`, which restarts it elsewhere after a preemption."""
    run_lines = [
        "set -euo pipefail",
        f"cd {shlex.quote(job.directory)}",
        'master=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)',
        f"exec {job.node_shell_command()}",
    ]
    recovery = {"max_restarts_on_errors": job.max_restarts, "recover_on_exit_codes": [EXIT_STOPPED]}
    resources: dict[str, Any] = {"accelerators": f"{job.accelerator}:{job.devices}"}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    resources["job_recovery"] = recovery
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    if job.volume:
        task["volumes"] = {job.mount_path: job.volume}
    if job.environment:
        task["envs"] = dict(job.environment)
    if job.secrets:
        task["secrets"] = dict.fromkeys(job.secrets)  # null: `sky jobs launch --secret NAME`
    return _yaml({**task, "run": "\n".join(run_lines) + "\n"})


def _yaml(value: Any) -> str:
    """Return YAML that keeps the order of keys, with multi-line text as block literals."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


TEMPLATES = {
    "slurm": slurm_script,
    "kubernetes": jobset,
    "trainjob": trainjob,
    "skypilot": skypilot_task,
}
