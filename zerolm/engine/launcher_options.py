"""Inputs to DeepSpeed's launcher (0.19.8): its flags, and variables for ranks on other hosts.

The launcher forwards some variables of its own environment, and copies each line of
`.deepspeed_env` into the command for a host's shell. pdsh and that shell may change characters in
these lines and in the script's arguments. Only the launcher reads that file. Standard library only.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.common.command_line import count
from zerolm.common.errors import ConfigError
from zerolm.common.records import unreadable

DEFAULT_PORT = 29500  # deepspeed/launcher/constants.py, and torchrun's
MPI_LAUNCHERS = ("openmpi", "mpich", "impi", "mvapich")
SHORT = {"-H": "--hostfile", "-i": "--include", "-e": "--exclude", "-q": "--quiet"}
ALIASES = {"num_accelerators": "num_gpus"}
# deepspeed/launcher/runner.py: EXPORT_ENVS, and the prefix added by its CUDA accelerator
FORWARDED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
VARIABLE = re.compile(r"[A-Z_][A-Z_0-9]*", re.IGNORECASE | re.ASCII)
# deepspeed/launcher/multinode_runner.py, add_export: double quotes around all but simple values.
# pdsh replaces %h, %u, %n and %% (pipecmd.c).
CHANGED_VALUE = re.compile(r"""["$`\0]|\\(\\|$)|%[hun%]|^'.*'$""", re.DOTALL)
# deepspeed/launcher/multinode_runner.py: only an argument with a space gets double quotes.
CHANGED_ARGUMENT = re.compile(r"[^\w@%+=:,./^!~#-]|^[~#]|^$|%[hun%]")
CHANGED_IN_QUOTES = re.compile(r"""[$`]|\\([\\"]|$)|%[hun%]""")


class LauncherFlag(NamedTuple):
    """A flag of DeepSpeed's launcher; it takes no value if `metavar` is empty.

    Attributes:
        read: parses the value in other commands that have the same flag.
    """

    metavar: str
    help: str
    read: Callable[[str], Any] = str


# deepspeed/launcher/runner.py, without the flags that do not start pretrain.py.
LAUNCHER_FLAGS = {
    "num_gpus": LauncherFlag("N", "number of devices to use on each host (default: all)"),
    "num_nodes": LauncherFlag("N", "number of hosts in the hostfile to use (default: all)"),
    "hostfile": LauncherFlag("FILE", "hosts, one `name slots=N` per line (-H)"),
    "include": LauncherFlag(
        "HOST[:DEVICE,...]", "use only these hosts or devices, joined with @ (-i)"
    ),
    "exclude": LauncherFlag(
        "HOST[:DEVICE,...]", "do not use these hosts or devices, joined with @ (-e)"
    ),
    "master_addr": LauncherFlag(
        "ADDRESS", "address of rank 0 (default: as reported by the first host)"
    ),
    "master_port": LauncherFlag(
        "PORT", f"port on which rank 0 listens (default: {DEFAULT_PORT})", count
    ),
    "ssh_port": LauncherFlag("PORT", "ssh port of the hosts (default: ssh's own)", count),
    "launcher": LauncherFlag(
        "NAME", "multi-node launcher: pdsh, openmpi, slurm, ... (default: pdsh)"
    ),
    "launcher_args": LauncherFlag("TEXT", "arguments for --launcher, as one quoted string"),
    "no_ssh": LauncherFlag("", "start only this host's ranks; needs --node_rank"),
    "node_rank": LauncherFlag("N", "with --no_ssh: rank of this host, from 0"),
    "no_ssh_check": LauncherFlag("", "do not test the ssh connections first"),
    "force_multi": LauncherFlag("", "use the multi-node launcher even for a single host"),
    "bind_cores_to_rank": LauncherFlag("", "bind each rank to its own cores"),
    "bind_core_list": LauncherFlag("LIST", "cores to bind to, e.g. 0-15,32-47"),
    "venv_script": LauncherFlag("FILE", "script that activates an environment on each host"),
    "enable_each_rank_log": LauncherFlag("DIR", "write each rank's output to a file in DIR"),
    "save_pid": LauncherFlag("", "write the launcher's process ID to a file in /tmp"),
    "log_level": LauncherFlag("LEVEL", "log level of the launcher (default: error)"),
    "quiet": LauncherFlag("", "print only the launcher's errors (-q)"),
}
# How the node launcher starts ranks; a flag of zerolm's own launcher, not of DeepSpeed's.
RANK_START, AUTO, FORK, FRESH, DEEPSPEED = "rank_start", "auto", "fork", "fresh", "deepspeed"
LAUNCHER_FLAGS[RANK_START] = LauncherFlag(
    "HOW",
    "fork ranks from one process with their imports, start them afresh, or use deepspeed's node "
    "launcher: auto, fork, fresh or deepspeed (default: auto, which forks on hosts without an "
    "accelerator)",
)


def rank_start(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return how to start ranks, and the arguments without the flag for it.

    Args:
        argv: a launcher's flags, a script, and the script's arguments, which are kept.

    Raises:
        ConfigError: the flag has a value that is not in its help.
    """
    script = next((n for n, word in enumerate(argv) if word.endswith(".py")), len(argv))
    for place, word in enumerate(argv[:script]):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") == f"__{RANK_START}":
            after = place + (1 if equals else 2)
            value = value if equals else "".join(argv[place + 1 : after])
            if value not in (AUTO, FORK, FRESH, DEEPSPEED):
                raise ConfigError(
                    f"command line: {name}: {value!r} is none of {AUTO}, {FORK}, {FRESH} and "
                    f"{DEEPSPEED}. Choose one of them."
                )
            return value, [*argv[:place], *argv[after:]]
    return AUTO, list(argv)


def change_of(value: str) -> str | None:
    """Return why a value would not reach ranks on other hosts unchanged, or None if it would."""
    if not (found := CHANGED_VALUE.search(value)):
        return None
    if "'" in found[0] or '"' in found[0]:
        return "contains quotes, which values with spaces do not need. Remove them."
    return (
        f"contains {found[0]!r}, which a host's shell or pdsh would replace. Write the final value."
    )


def deepspeed_env_files(environment: Mapping[str, str] = os.environ) -> dict[Path, dict[str, str]]:
    """Return {file: its variables} for the `.deepspeed_env` files, in the order DeepSpeed reads
    them.

    Raises:
        ConfigError: lists every line that would not reach the ranks unchanged.
    """
    directories = (Path(environment.get("HOME") or Path.home()), Path.cwd())
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    files: dict[Path, dict[str, str]] = {}
    problems = []
    for path in dict.fromkeys(directory / name for directory in directories):
        if not path.is_file():
            continue
        files[path] = {}
        try:
            with path.open() as file:
                lines = list(file)
        except (OSError, UnicodeDecodeError) as error:
            problems.append(unreadable(path, error, "Write it as UTF-8 text."))
            continue
        for number, line in enumerate(lines, start=1):
            key, equals, value = (part.strip() for part in line.partition("="))
            key = key.removeprefix("export ").lstrip()
            if not equals or not VARIABLE.fullmatch(key):
                problems.append(
                    f"{path}: line {number}: not NAME=VALUE, so DeepSpeed's launcher would fail "
                    f"or start nothing. Remove comments, blank lines and text around names."
                )
            elif change := change_of(value):
                problems.append(f"{path}: line {number}: {key}: {change}")
            files[path][key] = value
    if problems:
        raise ConfigError(problems)
    return files
