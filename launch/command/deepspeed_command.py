"""Read and edit the arguments of a `deepspeed ... pretrain.py ...` command.

Arguments before `pretrain.py` belong to DeepSpeed's launcher, those after it to pretrain.py.
"""

from collections.abc import Sequence
from pathlib import Path

from zerolm.common.errors import ConfigError
from zerolm.config.settings import Settings
from zerolm.parts.parse import parse_settings

SCRIPT = "pretrain.py"


def run_directory(command: Sequence[str]) -> Path:
    """Return the run directory that a command sets with `--run_dir` or in its `--settings` file."""
    script = _script_index(command)
    if script is None:
        raise ConfigError(
            f"command line: {' '.join(command) or 'nothing'}: does not run {SCRIPT}. Write: "
            f"zerolm supervise -- deepspeed ... {SCRIPT} ..."
        )
    settings, _ = parse_settings(command[script + 1 :])  # pretrain.py itself reports bad flags
    if settings.run_dir is None:
        raise ConfigError(f"command line: --run_dir is missing. Add it after {SCRIPT}.")
    return Path(settings.run_dir)


def pretrain_flags(arguments: Sequence[str], settings: str | None = None) -> list[str]:
    """Return pretrain.py's flags: the arguments after its name, or all if its name is missing.

    Args:
        settings: a settings file to add in front of the flags, which override its values.
    """
    script = _script_index(arguments)
    first = [] if settings is None else ["--settings", settings]
    return [*first, *(arguments if script is None else arguments[script + 1 :])]


def parse_pretrain_flags(flags: Sequence[str]) -> Settings:
    """Return the settings that pretrain.py's flags set, which must include a run directory.

    Raises:
        ConfigError: lists every flag and value that pretrain.py's parser would refuse.
    """
    settings, problems = parse_settings(flags)
    if settings.run_dir is None:
        problems.append("command line: --run_dir is missing. Add it after the --.")
    if problems:
        raise ConfigError(problems)
    return settings


def launcher_option(command: Sequence[str], name: str) -> str | None:
    """Return the value of a launcher option, or None if the command does not set the option."""
    for index, argument in enumerate(_launcher_arguments(command)):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name:
            return command[index + 1]
    return None


def with_launcher_option(command: Sequence[str], name: str, value: str) -> list[str]:
    """Return the command with the value of a launcher option replaced.

    A command that does not set the option is returned unchanged.
    """
    edited = list(command)
    for index, argument in enumerate(_launcher_arguments(command)):
        if argument.startswith(f"{name}="):
            edited[index] = f"{name}={value}"
            break
        if argument == name:
            edited[index + 1] = value
            break
    return edited


def _launcher_arguments(command: Sequence[str]) -> Sequence[str]:
    return command[: _script_index(command)]


def _script_index(arguments: Sequence[str]) -> int | None:
    indices = (index for index, text in enumerate(arguments) if Path(text).name == SCRIPT)
    return next(indices, None)
