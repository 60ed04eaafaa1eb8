"""A run's hosts, as DeepSpeed's launcher reads them from a hostfile.

python -m launch.command.hosts HOSTFILE NUM_NODES [flags]    # prints problems with a launch
"""

import os
import re
import sys
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.command.environment import environment_problems
from zerolm.common import interrupts
from zerolm.common.errors import ConfigError
from zerolm.common.records import unreadable
from zerolm.engine.launcher_options import CHANGED_ARGUMENT, CHANGED_IN_QUOTES, MPI_LAUNCHERS

HOST_LINE = re.compile(  # a name like "-x" would be an ssh option
    r"(?!-)[!-~]+ slots=0*[1-9][0-9]*( max[_-]slots=[0-9]+)?", re.ASCII
)
CHOOSE_PARTS = ("num_nodes", "num_gpus", "include", "exclude")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
KEEP_ALIVE = "-o ServerAliveInterval=15 -o ServerAliveCountMax=4"  # ssh gives up after a minute


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: a host name and `slots=N`."""

    name: str
    slots: str

    @property
    def num_slots(self) -> int:
        return int(self.slots.removeprefix("slots="))


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile's `name slots=N` lines; refuse any line that DeepSpeed or ssh would misread.

    Lines may end in Open MPI's `max_slots=N`, which DeepSpeed ignores.
    """
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(unreadable(path, error, "List your hosts in it.")) from None
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        where = f"{path}: line {number}: {line!r}"
        if not HOST_LINE.fullmatch(" ".join(fields)):
            problems.append(f"{where} is not `name slots=N` with N at least 1. Correct it.")
        elif fields[0] in hosts:
            problems.append(f"{where} lists {fields[0]} again. Keep one of its lines.")
        else:
            hosts[fields[0]] = Host(*fields[:2])
    if not hosts and not problems:
        problems.append(f"{path}: lists no host. Write a line `name slots=N` for each host.")
    if problems:
        raise ConfigError(problems)
    return list(hosts.values())


def used_hosts(hostfile: str, num_nodes: str | None) -> int:
    """Return the number of hosts on which `deepspeed` starts.

    Args:
        num_nodes: value of `--num_nodes`; None means all hosts in the hostfile.

    Raises:
        ConfigError: `num_nodes` or the hostfile is invalid, or the hostfile lists fewer hosts.
    """
    if num_nodes is not None and not (num_nodes.isdecimal() and int(num_nodes)):
        raise ConfigError(
            f"--num_nodes: {num_nodes} is not a positive number of hosts. Write 1 or more."
        )
    found = len(read_hostfile(Path(hostfile)))
    if found < int(num_nodes or found):
        raise ConfigError(
            f"{hostfile}: {found} host(s), --num_nodes is {num_nodes}: DeepSpeed would silently "
            f"start on fewer. Add hosts, or request fewer."
        )
    return int(num_nodes or found)


def used_slots(
    slots: Mapping[str, int], include: str | None = None, exclude: str | None = None
) -> dict[str, int]:
    """Return {host: number of slots} for the hosts that `--include` or `--exclude` selects.

    Args:
        slots: {host: number of slots} as read from the hostfile.

    Raises:
        ConfigError: a flag names a host that does not exist, or excludes every host.
    """
    named: dict[str, int] = {}
    flag, value = ("--include", include) if include else ("--exclude", exclude)
    for part in filter(None, (value or "").split("@")):
        name, _, devices = part.partition(":")
        if name not in slots:
            raise ConfigError(
                f"command line: {flag}: {name}: not among the hosts {', '.join(slots)}. Correct it."
            )
        named[name] = len(set(devices.split(","))) if devices else slots[name]
    if not include:
        named = {name: number - named.get(name, 0) for name, number in slots.items()}
    used = {name: named[name] for name in slots if named.get(name, 0) > 0}
    if not used:
        raise ConfigError(
            f"command line: {flag} {value}: leaves no device to train on. Exclude fewer."
        )
    return used


def started_slots(slots: Mapping[str, int], given: Mapping[str, str | None]) -> dict[str, int]:
    """Return {host: number of ranks} that `deepspeed` starts with its flags.

    Args:
        slots: {host: number of slots} as read from the hostfile.
        given: {name of a flag in `CHOOSE_PARTS`: its value}.

    Raises:
        ConfigError: a flag names a host that does not exist, or excludes every host.
    """
    used = used_slots(slots, given.get("include"), given.get("exclude"))
    sizes = {name: str(given.get(name) or "0") for name in ("num_nodes", "num_gpus")}
    if problems := [
        f"command line: --{name}: {size} is not a number. Write 1 or more."
        for name, size in sizes.items()
        if not size.isdecimal()
    ]:
        raise ConfigError(problems)
    number, each = map(int, sizes.values())
    return {name: each or used[name] for name in list(used)[: number or None]}


def visible_devices(given: Mapping[str, str | None]) -> list[str]:
    """Return the devices of this host on which `deepspeed` starts a rank each by the environment.

    Call this only without a hostfile, with which the launcher ignores the variable; it also ignores
    it if flags choose the devices.

    Args:
        given: {name of a launcher flag: its value}.

    Raises:
        ConfigError: the launcher would end in a traceback.
    """
    value = os.environ.get(VISIBLE_DEVICES, "")
    chosen = [name for name in CHOOSE_PARTS if given.get(name)]
    if not value or chosen not in ([], ["num_nodes"]):
        return []
    where = f"environment: {VISIBLE_DEVICES}: {value}"
    if chosen:
        raise ConfigError(f"{where}: DeepSpeed fails with --num_nodes. Remove the flag.")
    devices = list(dict.fromkeys(each.strip() for each in value.split(",")))
    if not all(each.isdecimal() for each in devices):
        raise ConfigError(
            f"{where}: DeepSpeed's launcher reads only numbers of devices. Write those that "
            f"nvidia-smi lists, or give --num_gpus, with which it ignores the variable."
        )
    return devices


def mpi_problems(launcher: str, given: Collection[str]) -> list[str]:
    """Return a problem for each given flag that an MPI launcher of DeepSpeed does not support.

    Such a flag would make the launcher fail with a traceback.

    Args:
        given: names of the flags passed to DeepSpeed's launcher.
    """
    return [
        f"command line: --{name}: DeepSpeed's --launcher {launcher} starts on all hosts and slots "
        f"of the hostfile, and cannot select among them. Give a --hostfile of the hosts to use "
        f"instead."
        for name in CHOOSE_PARTS
        if launcher in MPI_LAUNCHERS and name in given
    ]


def ssh_problems(arguments: Sequence[str], launcher: str = "pdsh") -> list[str]:
    """Return a problem for each variable or script argument that ssh would alter or expose."""
    problems = environment_problems(num_hosts=2)
    if launcher == "pdsh":
        problems += [
            f"command line: {argument}: would be changed by the shell on the hosts. Write it "
            f"without special characters, or put it in a --settings file."
            for argument in arguments
            if (CHANGED_IN_QUOTES if " " in argument else CHANGED_ARGUMENT).search(argument)
        ]
    return problems


def keep_alive(environment: MutableMapping[str, str]) -> None:
    """Make pdsh's connections time out a minute after the network fails.

    By default, they never time out.
    """
    given = environment.get("PDSH_SSH_ARGS_APPEND", "")
    if "ServerAliveInterval" not in given:
        environment["PDSH_SSH_ARGS_APPEND"] = f"{given} {KEEP_ALIVE}".strip()


if __name__ == "__main__":
    interrupts.end_on_interrupt()
    hostfile, num_nodes, *arguments = sys.argv[1:]
    problems = []
    try:
        used_hosts(hostfile, num_nodes)
    except ConfigError as error:
        problems += error.problems
    print("\n".join([*problems, *ssh_problems(arguments)]))
