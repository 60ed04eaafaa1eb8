"""Check each host in a hostfile over ssh, and leave out hosts that fail the check.

DeepSpeed starts ranks on the first `--num_nodes` hosts of a hostfile; the other hosts are spares.
"""

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from launch.command.deepspeed_command import (
    launcher_option,
    pretrain_flags,
    with_launcher_option,
)
from launch.command.hosts import (
    CHOOSE_PARTS,
    Host,
    keep_alive,
    mpi_problems,
    read_hostfile,
    ssh_problems,
)
from zerolm.common.errors import ConfigError
from zerolm.common.shipped import code_command
from zerolm.engine.launcher_options import MPI_LAUNCHERS
from zerolm.run_dir.files import RunFiles

MAX_CONCURRENT_CHECKS = 64
MPI_ADDRESS = re.compile(r"\bMASTER_ADDR=(\S+)")  # in mpirun's arguments


class HostCheck(NamedTuple):
    """A shell command that fails on unusable hosts, and its time limit in seconds."""

    command: str
    seconds: float


class TooFewHostsError(ConfigError):
    """Too few hosts pass the check to start the run; starting may succeed later."""


def write_hostfile(path: Path, hosts: Sequence[Host]) -> None:
    path.write_text("".join(f"{host.name} {host.slots}\n" for host in hosts))


def default_check() -> str:
    """Return a shell command that fails on a host where torch or deepspeed cannot be imported.

    The command uses the directory and interpreter of this process, as DeepSpeed will.
    """
    directory = shlex.quote(str(Path.cwd()))
    return f"cd {directory} && {shlex.join(code_command('import torch, deepspeed'))}"


def remote_command(host: Host, command: str, ssh_port: str | None = None) -> list[str]:
    """Return the argv that runs a shell command on a host, using ssh for other hosts than this one.

    ssh receives the extra options that pdsh would pass, and never prompts.
    """
    if host.name in ("localhost", "127.0.0.1", socket.gethostname()):
        return ["sh", "-c", command]
    port = ["-p", ssh_port] if ssh_port else []
    pdsh_options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    no_prompt = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    return ["ssh", *no_prompt, *port, *pdsh_options, host.name, command]


def host_problem(
    host: Host, check: HostCheck, ssh_port: str | None = None, first: str = ""
) -> str | None:
    """Run a check on a host; return why it failed, or None if it passed.

    A check that times out is repeated once, since the files that it imports are cached by then.

    Args:
        first: shell commands to run before the check.
    """
    line = remote_command(host, first + check.command, ssh_port)
    for _ in range(2):
        try:
            done = subprocess.run(
                line, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=check.seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            continue
        except OSError as error:
            return str(error)
        if done.returncode == 0:
            return None
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return f"exit code {done.returncode}" + (f": {output[-1]}" if output else "")
    return (
        f"`{check.command}` took longer than {check.seconds:g} s, twice. Give it more time with "
        f"--host_check_timeout, or a faster --host_check"
    )


def check_hosts(
    hosts: Sequence[Host],
    check: HostCheck,
    ssh_port: str | None = None,
    first: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Host], dict[str, str]]:
    """Check hosts concurrently; return ([hosts that passed], {name of any other host: problem}).

    Args:
        first: {short host name: shell commands to run before its check}.
    """

    def problem_of(host: Host) -> str | None:
        return host_problem(host, check, ssh_port, first.get(host.name.partition(".")[0], ""))

    with ThreadPoolExecutor(MAX_CONCURRENT_CHECKS) as pool:
        problems = list(pool.map(problem_of, hosts))
    pairs = list(zip(hosts, problems, strict=True))
    passed = [host for host, problem in pairs if problem is None]
    return passed, {host.name: problem for host, problem in pairs if problem is not None}


def without_failing_hosts(
    command: list[str],
    run_dir: Path,
    min_hosts: int | None,
    check: HostCheck,
    log: Callable[[str], None],
    unwanted: Mapping[str, str] = MappingProxyType({}),
    left: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Check the hosts of a command, and replace its hostfile by one without the hosts that failed.

    Return the new command. A command without a hostfile is returned unchanged.

    Args:
        min_hosts: minimum number of hosts; None means the number that the command requests.
        unwanted: {host: why it should be left out if there are spares}.
        left: {short host name: shell commands that kill processes left there by an attempt}.

    Raises:
        TooFewHostsError: fewer hosts than the minimum pass the check.
        ConfigError: the hostfile cannot be read, or the command or environment cannot be used with
            several hosts.
    """
    hostfile = launcher_option(command, "--hostfile") or launcher_option(command, "-H")
    if hostfile is None:
        return command
    keep_alive(os.environ)
    hosts = read_hostfile(Path(hostfile))
    requested = int(launcher_option(command, "--num_nodes") or len(hosts))
    launcher = (launcher_option(command, "--launcher") or "pdsh").lower()
    given = [name for name in CHOOSE_PARTS if launcher_option(command, f"--{name}")]
    problems = mpi_problems(launcher, given)
    if requested > 1 and "--no_ssh" not in command:
        problems += ssh_problems(pretrain_flags(command), launcher)
    if problems:
        raise ConfigError(problems)
    ssh_port = launcher_option(command, "--ssh_port")
    passed, failed = check_hosts(hosts, check, ssh_port, left)
    minimum = min_hosts or requested
    reasons = {name.partition(".")[0]: why for name, why in unwanted.items()}
    found = {host: reasons.get(host.name.partition(".")[0]) for host in passed}
    out = {host.name: why for host, why in found.items() if why}
    if len(passed) - len(out) >= minimum:
        passed = [host for host in passed if host.name not in out]
        failed |= out
    else:
        for name, why in out.items():
            log(f"{hostfile}: {name}: {why}, but there is no spare host")
    for name, problem in failed.items():
        log(f"{hostfile}: {name} is left out: {problem}")
    if len(passed) < minimum:
        raise TooFewHostsError(
            f"{hostfile}: {len(passed)} of {len(hosts)} hosts pass the check, but the run needs "
            f"{minimum}. Repair the others, add spares, or lower --min_hosts."
        )
    used = passed[:requested]
    log(f"hosts: {', '.join(host.name for host in used)}")
    written = RunFiles(run_dir).hostfile
    write_hostfile(written, used if launcher in MPI_LAUNCHERS else passed)
    for name in ("--hostfile", "-H"):
        command = with_launcher_option(command, name, str(written))
    command = with_launcher_option(command, "--num_nodes", str(len(used)))
    if launcher_option(command, "--master_addr") in failed:
        command = with_launcher_option(command, "--master_addr", used[0].name)
    arguments = launcher_option(command, "--launcher_args") or ""
    if (given_address := MPI_ADDRESS.search(arguments)) and given_address[1] in failed:
        changed = MPI_ADDRESS.sub(f"MASTER_ADDR={used[0].name}", arguments)
        command = with_launcher_option(command, "--launcher_args", changed)
    return command
