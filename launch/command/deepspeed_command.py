"""Read and edit the arguments of a `deepspeed ... pretrain.py ...` command.

Options before `pretrain.py` are DeepSpeed's launcher's; what follows it are flags of pretrain.py.
"""

from collections.abc import Sequence
from pathlib import Path

from zerolm.common.errors import ConfigError
from zerolm.config.settings import Settings
from zerolm.parts.parse import parse_settings

SCRIPT = "pretrain.py"


def run_directory(command: Sequence[str]) -> Path:
    """Return the run directory of a command: from `--run_dir`, or from its `--settings` file."""
    script = _script_index(command)
    if script is None:
        raise ConfigError(
            f"command line: {' '.join(command) or 'nothing'}: does not start {SCRIPT}. Write: "
            f"zerolm supervise -- deepspeed ... {SCRIPT} ..."
        )
    settings, _ = parse_settings(command[script + 1 :])  # pretrain.py itself reports bad flags
    if settings.run_dir is None:
        raise ConfigError(f"command line: --run_dir is missing. Add it after {SCRIPT}.")
    return Path(settings.run_dir)


def pretrain_flags(arguments: Sequence[str], settings: str | None = None) -> list[str]:
    """Return the flags of pretrain.py: everything after its name, or all arguments without it.

    Args:
        settings: a settings file, whose values these flags override.
    """
    script = _script_index(arguments)
    first = [] if settings is None else ["--settings", settings]
    return [*first, *(arguments if script is None else arguments[script + 1 :])]


def parse_pretrain_flags(flags: Sequence[str]) -> Settings:
    """Return the settings given by flags of pretrain.py, which must include a run directory.

    Raises:
        ConfigError: every flag and value that pretrain.py's parser would refuse.
    """
    settings, problems = parse_settings(flags)
    if settings.run_dir is None:
        problems.append("command line: --run_dir is missing. Add it after the --.")
    if problems:
        raise ConfigError(problems)
    return settings


def launcher_option(command: Sequence[str], name: str) -> str | None:
    """Return the value of a launcher option (before the script), None if it is not given."""
    for index, argument in enumerate(_launcher_arguments(command)):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name:
            return command[index + 1]
    return None


def with_launcher_option(command: Sequence[str], name: str, value: str) -> list[str]:
    """Return the command with a new value for one of the launcher options that it gives."""
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
