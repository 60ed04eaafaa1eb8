"""`zerolm doctor`: check every host before a run starts, and print one table.

All hosts are queried concurrently, each over one ssh connection, with a time limit. Then all hosts
together check that they share the run directory, and measure the network.
"""

import argparse
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.command.deepspeed_command import SCRIPT, launcher_option, pretrain_flags
from launch.command.environment import environment_problems, forwarded_environment
from launch.command.hosts import (
    VISIBLE_DEVICES,
    Host,
    read_hostfile,
    started_slots,
    visible_devices,
)
from launch.command.train import add_launcher_flags, run_command
from launch.doctor import network
from launch.doctor.checks import run_checks
from launch.doctor.findings import ALL, OK, RED, Finding, from_problem, merge_hosts, table
from launch.doctor.host_session import HostError, Session
from launch.doctor.requirements import Requirements, checkpoint_bytes, required_operators
from launch.estimate import measured_hosts
from zerolm.common.command_line import count, duration, file_to_write
from zerolm.common.errors import EXIT_REFUSED, ConfigError
from zerolm.common.machine import DEFAULT_HOSTFILE
from zerolm.common.secrets import masked
from zerolm.engine.launcher_options import DEFAULT_PORT
from zerolm.parts.parse import add_settings, parse_settings
from zerolm.watchdog import limits

CLOSE_SECONDS = 5.0  # time limit for closing all sessions
DEEP_SECONDS = 12 * 3600.0
# {part of ssh's error message: fix}; HOST is replaced with the host's name
SSH_FIXES = {
    "Permission denied": "add your key to ~/.ssh/authorized_keys there: ssh-copy-id HOST",
    "Host key verification failed": "verify its host key with its owner, then ssh-keygen -R HOST "
    "and ssh-keyscan HOST >> ~/.ssh/known_hosts",
    "resolve hostname": "correct its name in the hostfile, or add it to /etc/hosts on every host",
    "Connection refused": "start its ssh server, or give its port: --ssh_port",
    "Too many authentication": "name the key in ~/.ssh/config, with IdentitiesOnly yes",
    "exit code 255": "start it, and open its ssh port",
    "no answer": "find out what it is waiting for: its disks, a mount, its load",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [flags] -- [deepspeed ...] pretrain.py's flags"
    parser.description = (
        "Check the hosts of a hostfile, or this host, and compare them. Problems are printed as "
        "red lines, each with a fix. Exit code: 0 no problem, 2 problems to fix before the run "
        "starts."
    )
    parser.add_argument("--hostfile", metavar="FILE", help="hosts to check (default: this host)")
    parser.add_argument(
        "--num_nodes", type=count, metavar="N", help="number of hosts that the run needs"
    )
    add_settings(parser, ["settings"])
    add_launcher_flags(parser, ["master_addr", "master_port", "ssh_port"])
    parser.add_argument(
        "--deep",
        action="store_true",
        help="compare every byte of the shards on each host with the checksums",
    )
    parser.add_argument(
        "--timeout", type=duration, default=120.0, metavar="DURATION",
        help="time limit for each request to a host (default: 2m)",
    )  # fmt: skip
    parser.add_argument(
        "--write", type=file_to_write, metavar="FILE",
        help="write the hosts' devices and the links between them, for zerolm plan --measured FILE",
    )  # fmt: skip
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; return 0 if no line is red, else 2."""
    command = run_command(arguments)
    if arguments.collect:
        from launch.doctor import collector  # slow import, which --help avoids

        answers, sys.stdout = sys.stdout, sys.stderr  # imports may print to stdout
        collector.serve(sys.stdin, answers)
        return 0
    doctor = Doctor(arguments, command)
    if arguments.write and len(doctor.hosts) == 1:
        raise ConfigError(
            f"command line: --write: {arguments.write}: there is one host, and so no link to "
            f"measure. Name the hosts with --hostfile, or remove --write."
        )
    findings = doctor.findings()
    output = getattr(sys.stdout, "stream", sys.stdout)
    print(masked(table(findings, color=output.isatty())), file=output)
    red = sum(finding.state == RED for finding in findings)
    print(f"{red} problem(s) to fix before the run starts" if red else "all hosts are ready")
    written = doctor.write(arguments.write, findings) if arguments.write else True
    return EXIT_REFUSED if red or not written else 0


class Doctor:
    """Checks all hosts and collects the findings.

    Args:
        arguments: the doctor's own flags, which take precedence over the command's launcher
            options.
        command: pretrain.py's flags, or a complete `deepspeed ... pretrain.py ...` command.

    Raises:
        ConfigError: the hostfile cannot be read.
    """

    def __init__(self, arguments: argparse.Namespace, command: Sequence[str]):
        has_launcher = any(Path(argument).name == SCRIPT for argument in command)

        def option(name: str) -> Any:
            value = getattr(arguments, name)
            if value is None and has_launcher:
                value = launcher_option(command, f"--{name}")
            return value

        self.flags = pretrain_flags(command, arguments.settings)
        self.settings, _ = parse_settings(self.flags)  # each host reports its own problems
        hostfile = option("hostfile") or launcher_option(command, "-H")
        if hostfile is None and Path(DEFAULT_HOSTFILE).is_file():
            hostfile = DEFAULT_HOSTFILE
        self.hostfile = hostfile
        self.selection = {
            name: launcher_option(command, f"--{name}") or launcher_option(command, short)
            for name, short in (("include", "-i"), ("exclude", "-e"))
        }
        self.selection["num_gpus"] = launcher_option(command, "--num_gpus")
        self.selection["num_nodes"] = option("num_nodes")
        self.hosts, self.slots = [Host("localhost", "slots=1")], {"localhost": 0}
        if hostfile:
            hosts = read_hostfile(Path(hostfile))
            self.slots = {host.name: host.num_slots for host in hosts}
            self.slots = started_slots(self.slots, self.selection)
            self.hosts = [host for host in hosts if host.name in self.slots]
        self.num_nodes = int(option("num_nodes") or 0)
        self.port, ssh_port = int(option("master_port") or DEFAULT_PORT), option("ssh_port")
        self.ssh_port = str(ssh_port) if ssh_port else None
        self.master_addr, self.deep = option("master_addr"), arguments.deep
        self.seconds = max(arguments.timeout, DEEP_SECONDS if self.deep else 0.0)
        self.devices: Mapping[str, Any] = {}
        self.ranks: Mapping[str, int] = {}

    def findings(self) -> list[Finding]:
        """Query all hosts, and return the lines of the table."""
        found = self._check_num_hosts()
        problems = environment_problems(len(self.hosts))
        found += [from_problem("environment", "this host", problem) for problem in problems]
        forwarded = forwarded_environment() if len(self.hosts) > 1 and not problems else {}
        limits.raise_file_limit()  # a session keeps 5 files open
        opened: list[Session] = []
        with (
            ThreadPoolExecutor(max(len(self.hosts), 1)) as self.pool,
            contextlib.ExitStack() as cleanup,
        ):
            cleanup.callback(_close, opened)
            self.sessions = {}
            for host in self.hosts:
                session = Session(host, self.ssh_port, forwarded)
                opened.append(session)
                self.sessions[host.name] = session
            facts, unreachable = self._ask_all(self._facts)
            found += map(_name_a_host, merge_hosts([
                Finding("reachable", name, RED, problem, _unreachable_fix(problem, self.ssh_port))
                for name, problem in unreachable.items()
            ]))  # fmt: skip
            if not facts:
                return found
            if not unreachable:
                found.append(Finding("reachable", ALL, OK, f"{len(facts)} host(s) answer"))
            self.sessions = {name: self.sessions[name] for name in facts}
            self.devices = next(iter(facts.values()))["devices"]
            if self.hostfile is None:  # the launcher starts one rank per GPU
                (devices,) = (fact["devices"] for fact in facts.values())
                number, visible = devices["ranks"], visible_devices(self.selection)
                here = {"localhost": len(visible) or number}
                self.slots = started_slots(here, self.selection)
                found += [
                    Finding("devices", "localhost", RED, f"{VISIBLE_DEVICES} has device {each}, "
                            f"but there are {number}, from 0", "correct it")
                    for each in visible if int(each) >= number
                ]  # fmt: skip
            required = Requirements(
                slots={name: self.slots[name] for name in facts},
                checkpoint_bytes=checkpoint_bytes(self.settings),
                operators=lambda device_kind: required_operators(self.settings, device_kind),
                deep=self.deep,
            )
            found += run_checks(facts, required)
            found += self._check_shared_directory() + self._check_network(facts)
        return found

    def write(self, path: Path, findings: Sequence[Finding]) -> bool:
        """Write the hosts as measured, for a plan; print a line. Return whether that was done."""
        slots = {name: self.slots[name] for name in self.sessions}
        found = network.measured_hosts(findings, self.devices, slots, self.ranks)
        if isinstance(found, str):
            print(f"{path} was not written: {found}")
            return False
        print(measured_hosts.write(path, found))
        return True

    # ---- One host

    def _facts(self, name: str) -> dict[str, Any]:
        session = self.sessions[name]
        clock = session.clock_offset(self.seconds)
        facts = session.ask(self.seconds, "facts", flags=self.flags, deep=self.deep, port=self.port)
        return {**facts, "clock": clock}

    def _ask_all(
        self, ask: Callable[[str], Any], hosts: Iterable[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Call `ask` for all hosts, or the given ones, concurrently.

        Return ({host: answer}, {host: problem}); each host is in one of them.
        """
        names = list(self.sessions if hosts is None else hosts)

        def answer_or_problem(name: str) -> tuple[Any, str | None]:
            try:
                return ask(name), None
            except HostError as error:
                return None, str(error)

        answers, problems = {}, {}
        results = self.pool.map(answer_or_problem, names)
        for name, (answer, problem) in zip(names, results, strict=True):
            if problem is None:
                answers[name] = answer
            else:
                problems[name] = problem
        return answers, problems

    # ---- All hosts

    def _check_num_hosts(self) -> list[Finding]:
        if self.num_nodes <= len(self.hosts):
            return []
        text = f"the run needs {self.num_nodes} nodes, but {self.hostfile or 'this host'} provides"
        fix = f"add the missing hosts, or use --num_nodes {len(self.hosts)}"
        return [Finding("hosts", ALL, RED, f"{text} {len(self.hosts)}", fix)]

    def _check_shared_directory(self) -> list[Finding]:
        """Check that a file written by the first host is visible on every host."""
        run_dir = self.settings.run_dir
        if run_dir is None or len(self.sessions) == 1:
            return []
        first, name = next(iter(self.sessions)), f".doctor-{secrets.token_hex(8)}"

        def ask(host: str, action: str) -> bool:
            return self.sessions[host].ask(
                self.seconds, "token", run_dir=str(run_dir), name=name, do=action
            )

        try:
            ask(first, "write")
            visible, problems = self._ask_all(lambda host: ask(host, "see"))
            ask(first, "remove")
        except HostError as error:
            return [Finding("run_dir", first, RED, str(error), "make it writable there")]
        for host, is_visible in visible.items():
            if not is_visible:
                problems[host] = f"{run_dir}: a file written by {first} is not visible there"
        fix = "use a file system that all hosts share"
        found = [Finding("run_dir", host, RED, text, fix) for host, text in problems.items()]
        return found or [Finding("run_dir", ALL, OK, f"{run_dir}: shared")]

    def _check_network(self, facts: dict[str, Any]) -> list[Finding]:
        ranks = {name: self._num_ranks(name, fact) for name, fact in facts.items()}
        self.ranks = ranks
        first, fact = next(iter(facts.items()))
        address = self.master_addr or next(iter(fact["addresses"]), first)
        if len(facts) == 1:
            address = self.master_addr or "127.0.0.1"
        place = network.Place(first, address, fact["free_port"] if fact["port"] else self.port)

        def ask_all(
            request: str, arguments: Mapping[str, Mapping[str, Any]]
        ) -> tuple[dict[str, Any], dict[str, str]]:
            seconds = network.SECONDS + network.GRACE_SECONDS
            return self._ask_all(
                lambda name: self.sessions[name].ask(seconds, request, **arguments[name]), arguments
            )

        return network.check(facts, ranks, place, ask_all)

    def _num_ranks(self, name: str, fact: dict[str, Any]) -> int:
        """Return the number of ranks that a host runs in the network check."""
        if fact["devices"]["kind"] == "cpu":
            return 2 if len(self.sessions) == 1 else 1
        return min(self.slots[name], fact["devices"]["count"]) or 1


def _name_a_host(finding: Finding) -> Finding:
    """Return the finding with HOST in its fix replaced by the name of its first host."""
    return replace(finding, fix=finding.fix.replace("HOST", finding.host.partition(",")[0]))


def _close(sessions: Sequence[Session]) -> None:
    """Close all sessions within `CLOSE_SECONDS`, even if many hosts hang."""
    for session in sessions:
        session.hang_up()
    deadline = time.monotonic() + CLOSE_SECONDS
    for session in sessions:
        session.close(deadline)


def _unreachable_fix(problem: str, ssh_port: str | None) -> str:
    port = f"-p {ssh_port} " if ssh_port else ""
    for said, fix in SSH_FIXES.items():
        if said in problem:
            fix = fix.replace("ssh-copy-id ", f"ssh-copy-id {port}")
            fix = fix.replace("ssh-keyscan ", f"ssh-keyscan {port}")
            if ssh_port:
                fix = fix.replace("-R HOST", f"-R '[HOST]:{ssh_port}'")
            return (
                f"{fix}; try: ssh {port}-o BatchMode=yes HOST true; or take it out of the hostfile"
            )
    python, real = sys.executable, os.path.realpath(sys.executable)
    interpreter = python if real == python else f"{python} (which is {real})"
    return (
        f"{Path.cwd()} and {interpreter} must exist there at the same path: "
        f"bash launch/setup.sh on HOST"
    )
