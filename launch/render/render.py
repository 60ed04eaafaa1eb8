"""A run as a file for a scheduler: the flags of `python -m launch render`, checked.

Secrets are named, never written: their values come from the scheduler. Nothing is looked at on this
machine; `pretrain.py --check` and `python -m launch doctor` do that.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.command_words import flags_of, settings_of
from launch.flag_types import count, duration
from launch.forwarded import looks_secret
from launch.templates import TEMPLATES, Job
from zerolm.errors import ConfigError

START = {
    "slurm": "sbatch",
    "kubernetes": "kubectl apply -f",
    "trainjob": "kubectl apply -f",
    "skypilot": "sky jobs launch",
}
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DNS_LABEL_LENGTH = 40  # 63 in all, with what JobSet adds to it for the name of a pod


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    words = commands.add_parser(
        "render",
        usage="python -m launch render slurm|kubernetes|trainjob|skypilot --nodes N "
        "--devices_per_node D [flags] -- pretrain.py's flags",
        help="write a run as a file for Slurm, Kubernetes or SkyPilot",
        description="Write a run as a file for a scheduler. Exit code 75 of the run, saved and "
        "stopped, makes each of them start it again, 2 and 76 do not on Kubernetes.",
    )
    words.add_argument(
        "kind", choices=tuple(TEMPLATES), help="kubernetes: a JobSet; trainjob: Kubeflow's"
    )
    words.add_argument("--nodes", type=count, required=True, metavar="N", help="nodes of the run")
    words.add_argument(
        "--devices_per_node", type=count, required=True, metavar="D", help="ranks on each"
    )
    words.add_argument("--output", metavar="FILE", help="write it there (default: print it)")
    words.add_argument("--settings", metavar="FILE", help="settings or run.json of the run")
    words.add_argument("--name", help="of the job (default: the last part of --run_dir)")
    words.add_argument(
        "--time", type=duration, default=86400.0, metavar="DURATION",
        help="slurm: longest time of one start (default: 1d)",
    )  # fmt: skip
    words.add_argument(
        "--save_time", type=duration, default=600.0, metavar="DURATION",
        help="how long before its end a start is asked to save and stop (default: 10m)",
    )  # fmt: skip
    words.add_argument(
        "--max_restarts", type=count, default=20, metavar="N",
        help="kubernetes, skypilot: after failures (default: %(default)s)",
    )  # fmt: skip
    words.add_argument(
        "--directory", metavar="DIR", default=str(Path.cwd()),
        help="of this project on every node (default: the current one)",
    )  # fmt: skip
    words.add_argument(
        "--python", metavar="PYTHON", default=".venv/bin/python",
        help="there (default: %(default)s)",
    )  # fmt: skip
    words.add_argument(
        "--master_port", type=count, default=29500, metavar="PORT", help="(default: %(default)s)"
    )
    words.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE",
        help="variable of the run's environment, repeated; NAME alone in --secret for secrets",
    )  # fmt: skip
    words.add_argument(
        "--secret", action="append", default=[], metavar="NAME",
        help="variable whose value only the scheduler knows, repeated: WANDB_API_KEY, say",
    )  # fmt: skip
    words.add_argument(
        "--secret_name", default="zerolm", metavar="NAME",
        help="kubernetes: the Secret that holds them (default: %(default)s)",
    )  # fmt: skip
    words.add_argument("--image", help="kubernetes, skypilot: the container's image")
    words.add_argument(
        "--volume", metavar="NAME",
        help="kubernetes, skypilot: volume (claim) that all nodes share",
    )  # fmt: skip
    words.add_argument(
        "--mount_path", metavar="DIR", help="where it is mounted (default: --directory)"
    )
    words.add_argument(
        "--device_resource", default="nvidia.com/gpu", metavar="NAME",
        help="kubernetes: what the cluster calls a device (default: %(default)s)",
    )  # fmt: skip
    words.add_argument("--accelerator", metavar="NAME", help="skypilot: such as H100")
    words.add_argument(
        "--slurm", action="append", default=[], metavar="OPTION",
        help="slurm: one more #SBATCH option, repeated: --slurm=--partition=gpu",
    )  # fmt: skip


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Write the file, or print it."""
    text = TEMPLATES[arguments.kind](job_of(arguments, command))
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(arguments.output).write_text(text)
    except OSError as error:
        raise ConfigError(f"--output {arguments.output}: {error}. Name another file.") from None
    print(f"{arguments.output}: start it with: {START[arguments.kind]} {arguments.output}")
    return 0


def job_of(arguments: argparse.Namespace, command: Sequence[str]) -> Job:
    """Return what the file is to say.

    Raises:
        ConfigError: every flag that cannot be right, pretrain.py's among them.
    """
    problems: list[str] = []
    flags = flags_of(command)
    if arguments.settings is not None:
        flags = ["--settings", arguments.settings, *flags]
    run_dir = "run"
    try:
        run_dir = settings_of(flags).run_dir or run_dir
    except ConfigError as error:
        problems += error.problems
    name = re.sub(r"[^a-z0-9]+", "-", (arguments.name or Path(run_dir).name).lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > DNS_LABEL_LENGTH:
        problems.append(
            f"--name: {arguments.name or name}, must begin with a letter and have at most "
            f"{DNS_LABEL_LENGTH} letters, digits and dashes. Give --name."
        )
    environment: dict[str, str] = {}
    for pair in arguments.env:
        variable, equals, value = pair.partition("=")
        if not equals or not VARIABLE_NAME.fullmatch(variable):
            problems.append(f"--env: {variable}, must be NAME=VALUE. Correct it.")
        elif looks_secret(variable):
            problems.append(
                f"--env: {variable}, looks like a secret, which a file must not hold. Write "
                f"--secret {variable}, without its value."
            )
        environment[variable] = value
    problems += [
        f"--secret: {variable.partition('=')[0]}, must be the name of a variable alone. Leave its "
        f"value to the scheduler."
        for variable in arguments.secret
        if not VARIABLE_NAME.fullmatch(variable)
    ]
    if not arguments.directory.startswith("/"):
        problems.append(f"--directory: {arguments.directory}, must be absolute. Write it out.")
    if arguments.kind in ("kubernetes", "trainjob") and not arguments.image:
        problems.append("--image is missing, which Kubernetes starts. Name one with this Python.")
    if arguments.kind == "skypilot" and not arguments.accelerator:
        problems.append("--accelerator is missing, which SkyPilot looks for. Write H100, say.")
    if arguments.kind == "slurm" and arguments.save_time >= arguments.time:
        problems.append(
            f"--save_time: {arguments.save_time:.0f}s, must be below --time "
            f"{arguments.time:.0f}s. Shorten it."
        )
    problems += [
        f"--slurm: {option!r}, must be one option of sbatch such as --partition=gpu. Correct it."
        for option in arguments.slurm
        if not re.fullmatch(r"--?[A-Za-z][\w-]*([= ][^\n]*)?", option)
    ]
    if problems:
        raise ConfigError(problems)
    return Job(
        name=name, nodes=arguments.nodes, devices=arguments.devices_per_node, flags=flags,
        directory=arguments.directory, python=arguments.python,
        master_port=arguments.master_port, environment=environment, secrets=arguments.secret,
        time=arguments.time, save_seconds=arguments.save_time,
        max_restarts=arguments.max_restarts, image=arguments.image, volume=arguments.volume,
        mount_path=arguments.mount_path or arguments.directory,
        secret_name=arguments.secret_name, device_resource=arguments.device_resource,
        accelerator=arguments.accelerator, slurm=arguments.slurm,
    )  # fmt: skip
