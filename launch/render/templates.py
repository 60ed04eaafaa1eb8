"""Render a `Job` as an sbatch script.

The script starts `zerolm node` on every node with the same pretrain.py flags, and requeues the job
if the run exits with code 75. No side effects.
"""

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from zerolm.common.errors import EXIT_STOPPED
from zerolm.common.shipped import ROOT, RUN_MODULE


@dataclass(frozen=True)
class Job:
    """The contents of a job file.

    Attributes:
        nodes, devices: number of nodes, and number of ranks per node.
        directory: path of this project, which is the same on all nodes.
        python: the interpreter, as a path relative to `directory` or a program name.
        secrets: names of variables whose values the scheduler supplies.
        save_seconds: time to save and stop before the job's time limit.
        slurm: additional `#SBATCH` options.
        points: additional flags for each run in an array job.
        at_once: maximum number of concurrent runs in an array job; None means no limit.
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
    slurm: list[str]
    points: list[list[str]] = field(default_factory=list)
    at_once: int | None = None

    def node_shell_command(self) -> str:
        """Return the shell command for each node; it expects the address of node 0 in `$master`."""
        node = [self.python, run_module_on_nodes(self.directory), "launch", "node"]
        node += ["--nodes", str(self.nodes)]
        node += ["--devices_per_node", str(self.devices)]
        run = ["--", "pretrain.py", *self.flags]
        port, point = str(self.master_port), ""
        if self.points:  # array tasks may share a node
            port, point = f"$(({port} + SLURM_ARRAY_TASK_ID))", ' "${point[@]}"'
        where = f'--master_port {port} --master_addr "$master"'
        return f"{shlex.join(node)} {where} {shlex.join(run)}{point}"


def slurm_script(job: Job) -> str:
    """Return an sbatch script that runs the supervisor on the first node and a task on each node.

    `exec` makes the supervisor the process that receives the signal set with `--signal`. The
    supervisor forwards this signal to the ranks on its node, and all ranks save together. With
    `--requeue`, it also requeues the job.
    """
    minutes = math.ceil(job.time_seconds / 60)  # Slurm interprets 0 as no limit
    # By default, Slurm allocates only one core per task, and memory for one core.
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
        f"#SBATCH --output={job.name}-{'%A-%a' if job.points else '%j'}.log",
        *_array_options(job),
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
    if job.points:
        lines.append("case $SLURM_ARRAY_TASK_ID in")
        for number, flags in enumerate(job.points):
            lines.append(f"    {number}) point=({shlex.join(flags)}) ;;")
        lines.append("esac")
    supervise = [job.python, run_module_on_nodes(job.directory), "launch", "supervise", "--requeue"]
    task = f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
    lines += [
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"',
        'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        f"exec {shlex.join(supervise)} -- \\",
        f"    {task} --kill-on-bad-exit=1 \\",
        f"    {job.node_shell_command()}",
    ]
    return "\n".join(lines) + "\n"


def run_module_on_nodes(directory: str) -> str:
    """Return the path of `run_module.py` on the nodes.

    It is relative to the project's directory, or absolute if that directory exists here but does
    not contain the file.
    """
    path = RUN_MODULE.relative_to(ROOT)
    is_elsewhere = Path(directory).is_dir() and not (directory / path).exists()
    return str(RUN_MODULE if is_elsewhere else path)


def _array_options(job: Job) -> list[str]:
    limit = f"%{job.at_once}" if job.at_once is not None else ""
    return [f"#SBATCH --array=0-{len(job.points) - 1}{limit}"] if job.points else []
