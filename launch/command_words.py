"""The words of a `deepspeed ... pretrain.py ...` command: what they say, and with other values."""

from collections.abc import Sequence
from pathlib import Path

from zerolm.errors import ConfigError
from zerolm.flags import parse_settings
from zerolm.settings import Settings

SCRIPT = "pretrain.py"


def run_directory_of(command: Sequence[str]) -> Path:
    """Return the `--run_dir` of a command, from its flags or the file that `--settings` names.

    Raises:
        ConfigError: the command does not start pretrain.py, or names no run directory.
    """
    places = [number for number, word in enumerate(command) if Path(word).name == SCRIPT]
    if not places:
        raise ConfigError(
            f"command line: {' '.join(command) or 'nothing'}, does not start {SCRIPT}. Write: "
            f"python -m launch supervise -- deepspeed ... {SCRIPT} ..."
        )
    settings, _ = parse_settings(command[places[0] + 1 :])  # pretrain.py says what is wrong in it
    if settings.run_dir is None:
        raise ConfigError("command line: --run_dir is missing. Add it behind pretrain.py.")
    return Path(settings.run_dir)


def flags_of(words: Sequence[str]) -> list[str]:
    """Return the flags of pretrain.py: what stands behind it, or all the words without it."""
    places = [number for number, word in enumerate(words) if Path(word).name == SCRIPT]
    return list(words[places[0] + 1 :] if places else words)


def settings_of(flags: Sequence[str]) -> Settings:
    """Return the settings that flags of pretrain.py give, a run directory among them.

    Raises:
        ConfigError: each flag and value that pretrain.py would refuse, as far as parsing tells.
    """
    settings, problems = parse_settings(flags)
    if settings.run_dir is None:
        problems.append("command line: --run_dir is missing. Add it behind the --.")
    if problems:
        raise ConfigError(problems)
    return settings


def option(command: Sequence[str], name: str) -> str | None:
    """Return the value of an option of the launcher, which stands before the script."""
    for number, word in enumerate(command):
        if Path(word).name == SCRIPT:
            return None
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name:
            return command[number + 1]
    return None


def with_option(command: Sequence[str], name: str, value: str) -> list[str]:
    """Return the command with another value of an option that it has."""
    words = list(command)
    for number, word in enumerate(words):
        if Path(word).name == SCRIPT:
            break
        if word.startswith(f"{name}="):
            words[number] = f"{name}={value}"
            break
        if word == name:
            words[number + 1] = value
            break
    return words
