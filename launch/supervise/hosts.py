"""The hosts of a run: read from a hostfile, checked over ssh, and written without the bad ones.

DeepSpeed starts on the first `--num_nodes` hosts of the file: with more hosts in it than that, the
rest are spares.
"""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launch.command_words import option, with_option
from zerolm.errors import ConfigError

CHECK_SECONDS = 60.0
CHECKS_AT_ONCE = 64


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    name: str
    slots: str


def read_hostfile(path: Path) -> list[Host]:
    """Read `name slots=N` lines.

    Raises:
        ConfigError: the file cannot be read, or each line that is not one.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Name your hosts in it.") from None
    hosts, problems = [], []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not words[1].startswith("slots="):
            problems.append(f"{path}: line {number}: {line!r}, is not `name slots=N`. Correct it.")
        else:
            hosts.append(Host(*words))
    if not hosts and not problems:
        problems.append(f"{path}: names no host. Write a line `name slots=N` for each.")
    if problems:
        raise ConfigError(problems)
    return hosts


def write_hostfile(path: Path, hosts: Sequence[Host]) -> None:
    path.write_text("".join(f"{host.name} {host.slots}\n" for host in hosts))


def default_check() -> str:
    """Return the command that tells whether a host can take part: this Python and torch are there.

    It runs in the directory and with the interpreter of this process, which DeepSpeed needs too.
    """
    here, python = shlex.quote(str(Path.cwd())), shlex.quote(sys.executable)
    return f"cd {here} && {python} -c 'import torch, deepspeed'"


def shell_words(host: Host, command: str, ssh_port: str | None = None) -> list[str]:
    """Return the words that run a command in the shell of a host, over ssh unless it is this one.

    ssh gets the options that pdsh would give it, and never asks for anything.
    """
    if host.name in ("localhost", "127.0.0.1", socket.gethostname()):
        return ["sh", "-c", command]
    port = ["-p", ssh_port] if ssh_port else []
    more = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    quiet = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    return ["ssh", *quiet, *port, *more, host.name, command]


def problem_of(host: Host, command: str, ssh_port: str | None = None) -> str | None:
    """Run a check on a host; return what is wrong with it, or None.

    Args:
        command: for the shell of the host; it fails by its exit code.
    """
    try:
        done = subprocess.run(
            shell_words(host, command, ssh_port), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=CHECK_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer in {CHECK_SECONDS:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"exit code {done.returncode}" + (f": {said[-1]}" if said else "")


def check_hosts(
    hosts: Sequence[Host], command: str, ssh_port: str | None = None
) -> tuple[list[Host], dict[str, str]]:
    """Check all hosts at once; return the good ones in order, and {name: problem} of the others."""
    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        problems = list(pool.map(lambda host: problem_of(host, command, ssh_port), hosts))
    pairs = list(zip(hosts, problems, strict=True))
    good = [host for host, problem in pairs if problem is None]
    return good, {host.name: problem for host, problem in pairs if problem is not None}


def renewed(
    command: list[str],
    run_dir: Path,
    min_hosts: int | None,
    host_check: str | None,
    say: Callable[[str], None],
) -> list[str]:
    """Return a command with a hostfile of the hosts that are well; as it is without a hostfile.

    Args:
        min_hosts: fewest to start on; None: as many as the command asks for.
        host_check: command for the shell of each host; None: `default_check`.

    Raises:
        ConfigError: fewer hosts are well than that.
    """
    given = option(command, "--hostfile") or option(command, "-H")
    if given is None:
        return command
    hosts = read_hostfile(Path(given))
    needed = int(option(command, "--num_nodes") or len(hosts))
    port = option(command, "--ssh_port")
    good, bad = check_hosts(hosts, host_check or default_check(), port)
    for name, problem in bad.items():
        say(f"{given}: {name} is left out: {problem}")
    minimum = min_hosts or needed
    if len(good) < minimum:
        raise ConfigError(
            f"{given}: {len(good)} of {len(hosts)} hosts pass the check, the run needs {minimum}. "
            f"Mend the others, add spares, or lower --min_hosts."
        )
    used = good[:needed]
    say(f"hosts: {', '.join(host.name for host in used)}")
    write_hostfile(run_dir / "hosts", good)
    for name in ("--hostfile", "-H"):
        command = with_option(command, name, str(run_dir / "hosts"))
    command = with_option(command, "--num_nodes", str(len(used)))
    if option(command, "--master_addr") in bad:
        command = with_option(command, "--master_addr", used[0].name)
    return command
