"""The files that a scheduler starts a run from: they start `python -m launch node` on each node,
with the same words for pretrain.py, and start again what ends with exit code 75.

Pure: text from a `Job`. launch/render.py reads the flags.
"""

import shlex
from dataclasses import dataclass
from typing import Any

from zerolm.errors import EXIT_GAVE_UP, EXIT_REFUSED, EXIT_STOPPED


@dataclass(frozen=True)
class Job:
    """What all four files say.

    Attributes:
        flags: of pretrain.py.
        directory: of this project on the nodes, the same on each.
        python: relative to it, or a name.
        environment: variables with their values.
        secrets: names of variables whose values the scheduler keeps.
        time, save_seconds: longest time of a start, and how long before its end it is asked to
            save and stop.
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
    time: float
    save_seconds: float
    max_restarts: int
    image: str | None
    volume: str | None
    mount_path: str
    secret_name: str
    device_resource: str
    accelerator: str | None
    slurm: list[str]

    def node_words(self, master: str) -> list[str]:
        """Return the command that each node runs, without any quotes."""
        words = [self.python, "-m", "launch", "node", "--nodes", str(self.nodes)]
        words += ["--devices_per_node", str(self.devices), "--master_addr", master]
        words += ["--master_port", str(self.master_port), "--", "pretrain.py"]
        return words + self.flags


# -------------------------------------------------------------------------------------------------
# Slurm


def slurm_script(job: Job) -> str:
    """Return an sbatch script: the supervisor on the first node, one task on each.

    `exec` makes the supervisor the process that gets `--signal`; it passes that on to the ranks of
    its node, and all ranks save together. `--requeue` of it gives the job back to the queue.
    """
    minutes = int(job.time // 60)
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
        *(f"#SBATCH {option}" for option in job.slurm),
        "",
        "# The time is in minutes. USR1 comes before its end: the ranks save and stop with exit",
        f"# code {EXIT_STOPPED}, and the job goes back to the queue. srun hands the environment on",
        "# to every node, so no value stands on a command line.",
        "set -euo pipefail",
        f"cd {shlex.quote(job.directory)}",
    ]
    for name in job.secrets:
        lines.append(f': "${{{name}:?set it in the shell that calls sbatch}}"')
    for name, value in job.environment.items():
        lines.append(f"export {name}={shlex.quote(value)}")
    words = [shlex.quote(word) for word in job.node_words("MASTER")]
    words[words.index("MASTER")] = '"$master"'
    task = f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
    lines += [
        'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        f"exec {shlex.quote(job.python)} -m launch supervise --requeue -- \\",
        f"    {task} --kill-on-bad-exit=1 \\",
        f"    {' '.join(words)}",
    ]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------
# Kubernetes


def environment_entries(job: Job) -> list[dict[str, Any]]:
    """Return `env` of a container: values, and references to keys of a Secret."""
    entries: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in job.environment.items()
    ]
    for name in job.secrets:
        reference = {"secretKeyRef": {"name": job.secret_name, "key": name}}
        entries.append({"name": name, "valueFrom": reference})
    return entries


def volumes_of(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (volumes, volumeMounts): memory for NCCL and the loader's workers, and the claim."""
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.volume:
        claim = {"claimName": job.volume}
        volumes.append({"name": "shared", "persistentVolumeClaim": claim})
        mounts.append({"name": "shared", "mountPath": job.mount_path})
    return volumes, mounts


def kubernetes_words(job: Job) -> list[str]:
    """Return the node's command. Kubernetes would expand `$(NAME)` in the user's words.

    The address is the name that JobSet gives the first pod, under a TrainJob too.
    """
    words = job.node_words(f"{job.name}-node-0-0.{job.name}")
    return [word.replace("$(", "$$(") for word in words]


def jobset(job: Job) -> str:
    """Return a JobSet (v1alpha2): one indexed Job, whose pods are the nodes.

    Any failure starts all pods again, but for those exit codes that a restart does not help.
    """
    volumes, mounts = volumes_of(job)
    container = {
        "name": "node",
        "image": job.image,
        "workingDir": job.directory,
        "command": kubernetes_words(job),
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
    hopeless = {"operator": "In", "values": [EXIT_REFUSED, EXIT_GAVE_UP]}
    nodes = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": hopeless}]},
        "template": {"spec": pod},
    }
    rule = {
        "name": "hopeless",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [rule]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}],
    }
    about = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return _yaml({**about, "metadata": {"name": job.name}, "spec": spec})


def trainjob(job: Job) -> str:
    """Return a TrainJob (v1alpha1, Kubeflow Trainer 2.2 or newer) on the torch runtime.

    How often it starts again is for the runtime's failure policy to say.
    """
    volumes, mounts = volumes_of(job)
    pod = {
        "terminationGracePeriodSeconds": int(job.save_seconds),
        "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    # A TrainJob has no working directory of its own.
    change = f'cd {shlex.quote(job.directory)} && exec "$@"'
    spec = {
        "runtimeRef": {"name": "torch-distributed", "kind": "ClusterTrainingRuntime"},
        "trainer": {
            "image": job.image,
            "numNodes": job.nodes,
            "command": ["sh", "-c", change, "node"],
            "args": kubernetes_words(job),
            "env": environment_entries(job),
            "resourcesPerNode": {"limits": {job.device_resource: job.devices}},
        },
        "runtimePatches": [{"manager": "zerolm.io/render", "trainingRuntimeSpec": patch}],
    }
    about = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return _yaml({**about, "metadata": {"name": job.name}, "spec": spec})


# -------------------------------------------------------------------------------------------------
# SkyPilot


def skypilot_task(job: Job) -> str:
    """Return a task for `sky jobs launch`, which starts it again elsewhere after a preemption."""
    words = [shlex.quote(word) for word in job.node_words("MASTER")]
    words[words.index("MASTER")] = '"$master"'
    run_lines = [
        "set -euo pipefail",
        f"cd {shlex.quote(job.directory)}",
        'master=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)',
        f"exec {' '.join(words)}",
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
    """Return YAML in the order given, with text of several lines as it is."""
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
