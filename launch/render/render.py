"""`zerolm render`: write a job file for a scheduler, after checking the run's flags.

The file contains the names of secrets but never their values, which the scheduler supplies. This
machine is not checked; `pretrain.py --check` and `zerolm doctor` check machines.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.command.deepspeed_command import parse_pretrain_flags, pretrain_flags
from launch.command.environment import is_secret_name
from launch.command.train import add_launcher_flags, run_command
from launch.render.node import add_size_flags
from launch.render.templates import Job, slurm_script
from zerolm.common.command_line import duration
from zerolm.common.errors import ConfigError
from zerolm.engine.launcher_options import DEFAULT_PORT
from zerolm.parts.parse import add_settings

VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SBATCH_OPTION = re.compile(r"--?[A-Za-z][\w-]*([= ][^\n]*)?")
MAX_NAME_LENGTH = 40
VENV_PYTHON = ".venv/bin/python"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s slurm --nodes N --devices_per_node D [flags] -- pretrain.py's flags"
    parser.description = (
        "Write a Slurm job file for a run. The job is requeued when the run ends with exit code "
        "75 (saved and stopped). docs/examples has files for Kubernetes and SkyPilot."
    )
    parser.add_argument(
        "kind", choices=("slurm",),
        help="the scheduler; for Kubernetes and SkyPilot copy a file from docs/examples",
    )  # fmt: skip
    add_size_flags(parser)
    parser.add_argument("--output", metavar="FILE", help="file to write (default: standard output)")
    add_settings(parser, ["settings"])
    add_job_flags(parser)


def add_job_flags(parser: argparse._ActionsContainer) -> None:
    """Add the job file flags that do not depend on the command that the job runs."""
    parser.add_argument("--name", help="job name (default: last part of --run_dir)")
    parser.add_argument(
        "--time", type=duration, default=86400.0, metavar="DURATION",
        help="time limit for the job (default: 1d)",
    )  # fmt: skip
    parser.add_argument(
        "--save_time", type=duration, default=600.0, metavar="DURATION",
        help="time to save and stop: Slurm signals the run this long before --time (default: 10m)",
    )  # fmt: skip
    parser.add_argument(
        "--directory", metavar="DIR", default=str(Path.cwd()),
        help="absolute path of this project on every node (default: the current directory)",
    )  # fmt: skip
    parser.add_argument(
        "--python", metavar="PYTHON",
        help="Python interpreter on the nodes (default: .venv/bin/python, or this one if "
        "--directory has no .venv)",
    )  # fmt: skip
    add_launcher_flags(parser, ["master_port"], master_port=DEFAULT_PORT)
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE",
        help="environment variable for the run, repeatable; for secrets use --secret",
    )  # fmt: skip
    parser.add_argument(
        "--secret", action="append", default=[], metavar="NAME",
        help="environment variable whose value the scheduler supplies, such as WANDB_API_KEY, "
        "repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--slurm", action="append", default=[], metavar="OPTION",
        help="additional #SBATCH option, repeatable: --slurm=--partition=gpu",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Write or print the file."""
    text = slurm_script(job_from(arguments, run_command(arguments)))
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        write_job(text, arguments.output, "--output")
    return 0


def write_job(text: str, path: str, flag: str) -> None:
    """Write a job file to the path given by a flag, and print how to start it."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error}. Name another file.") from None
    print(f"{path}: start it with: sbatch {path}")


def job_from(arguments: argparse.Namespace, command: Sequence[str]) -> Job:
    """Return the job described by the flags and the command."""
    flags = pretrain_flags(command, arguments.settings)
    problems: list[str] = []
    run_dir = "run"
    try:
        run_dir = parse_pretrain_flags(flags).run_dir or run_dir
    except ConfigError as error:
        problems += error.problems
    name = re.sub(r"[^a-z0-9]+", "-", (arguments.name or Path(run_dir).name).lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > MAX_NAME_LENGTH:
        problems.append(
            f"--name: {arguments.name or name} must start with a letter and have at most "
            f"{MAX_NAME_LENGTH} letters, digits and dashes. Give --name."
        )
    environment, environment_problems = _environment(arguments)
    problems += environment_problems + _scheduler_problems(arguments)
    if problems:
        raise ConfigError(problems)
    return Job(
        name=name, nodes=arguments.nodes, devices=arguments.devices_per_node, flags=flags,
        directory=arguments.directory, python=arguments.python or _python(arguments.directory),
        master_port=arguments.master_port, environment=environment, secrets=arguments.secret,
        time_seconds=arguments.time, save_seconds=arguments.save_time, slurm=arguments.slurm,
    )  # fmt: skip


def _python(directory: str) -> str:
    """Return the interpreter of a directory, which may exist only on the nodes."""
    is_elsewhere = Path(directory).is_dir() and not Path(directory, VENV_PYTHON).exists()
    return sys.executable if is_elsewhere else VENV_PYTHON


def _environment(arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return (variables from --env, problems with --env and --secret)."""
    environment: dict[str, str] = {}
    problems = []
    for pair in arguments.env:
        variable, equals, value = pair.partition("=")
        if not equals or not VARIABLE_NAME.fullmatch(variable):
            problems.append(f"--env: {variable} must be NAME=VALUE. Correct it.")
        elif is_secret_name(variable):
            problems.append(
                f"--env: {variable} seems to be a secret, which must not be in a file. Write "
                f"--secret {variable} without its value."
            )
        environment[variable] = value
    problems += [
        f"--secret: {variable.partition('=')[0]} must be only a variable name. Leave its value to "
        f"the scheduler."
        for variable in arguments.secret
        if not VARIABLE_NAME.fullmatch(variable)
    ]
    return environment, problems


def _scheduler_problems(arguments: argparse.Namespace) -> list[str]:
    problems = []
    if not arguments.directory.startswith("/"):
        problems.append(f"--directory: {arguments.directory} must be absolute. Give the full path.")
    if arguments.save_time >= arguments.time:
        problems.append(
            f"--save_time: {arguments.save_time:.0f}s must be below --time "
            f"{arguments.time:.0f}s. Shorten it."
        )
    problems += [
        f"--slurm: {option!r} must be a single sbatch option such as --partition=gpu. Correct it."
        for option in arguments.slurm
        if not SBATCH_OPTION.fullmatch(option)
    ]
    return problems
