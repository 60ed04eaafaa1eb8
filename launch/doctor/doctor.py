"""Look at every host before a run starts on it: one table, each red line with its fix.

Each host is asked over one ssh connection, all at once and for a bounded time; then all of them
together write and see one file, and sum one tensor. Nothing stays behind.
"""

import argparse
import contextlib
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch import collector
from launch.command_words import SCRIPT, flags_of, option
from launch.findings import ALL, OK, RED, Finding, Run, compare, table
from launch.flag_types import count, duration
from launch.forwarded import environment_files, looks_secret
from launch.host_session import HostError, Session
from launch.hosts import Host, read_hostfile
from zerolm.errors import EXIT_REFUSED, ConfigError
from zerolm.flags import parse_settings
from zerolm.machine import DEFAULT_HOSTFILE
from zerolm.settings import Settings
from zerolm.values import shown_bytes

DEFAULT_PORT = 29500  # deepspeed/launcher/constants.py
ALL_REDUCE_SECONDS = 90.0
DEEP_SECONDS = 12 * 3600.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    words = commands.add_parser(
        "doctor",
        usage="python -m launch doctor [flags] -- [deepspeed ...] pretrain.py's flags",
        help="check every host before a run starts there",
        description="Check the hosts of a hostfile, or this one, and compare them. Exit code 0: "
        "nothing is red; 2: something is.",
    )
    words.add_argument("--hostfile", metavar="FILE", help="hosts to check (default: this one)")
    words.add_argument("--num_nodes", type=count, metavar="N", help="hosts that the run needs")
    words.add_argument("--settings", metavar="FILE", help="settings or run.json of the run")
    words.add_argument(
        "--master_addr", metavar="ADDRESS", help="(default: the first host's first address)"
    )
    words.add_argument(
        "--master_port", type=count, metavar="PORT", help=f"(default: {DEFAULT_PORT})"
    )
    words.add_argument("--ssh_port", type=count, metavar="PORT", help="as of deepspeed")
    words.add_argument(
        "--deep", action="store_true", help="check every byte of the shards on each host"
    )
    words.add_argument(
        "--timeout", type=duration, default=120.0, metavar="DURATION",
        help="for the answers of a host (default: 2m)",
    )  # fmt: skip
    words.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the table; return 0 if nothing in it is red, else 2."""
    if arguments.collect:
        answers, sys.stdout = sys.stdout, sys.stderr  # imports print what they like
        collector.serve(sys.stdin, answers)
        return 0
    findings = Doctor(arguments, command).findings()
    print(table(findings, color=sys.stdout.isatty()))
    red = sum(one.state == RED for one in findings)
    print(f"{red} thing(s) to mend before the run starts" if red else "all hosts are well")
    return EXIT_REFUSED if red else 0


class Doctor:
    """One visit to all hosts.

    Args:
        command: pretrain.py's flags, or the whole `deepspeed ... pretrain.py ...` command, whose
            options count where those of the doctor are not given.

    Raises:
        ConfigError: the hostfile cannot be read.
    """

    def __init__(self, arguments: argparse.Namespace, command: Sequence[str]):
        def given(name: str) -> Any:
            value = getattr(arguments, name)
            launcher = any(Path(word).name == SCRIPT for word in command)
            return value if value is not None or not launcher else option(command, f"--{name}")

        self.flags = flags_of(command)
        if arguments.settings is not None:
            self.flags = ["--settings", arguments.settings, *self.flags]
        self.settings, _ = parse_settings(self.flags)  # its problems are each host's to say
        hostfile = given("hostfile") or option(command, "-H")
        if hostfile is None and Path(DEFAULT_HOSTFILE).is_file():
            hostfile = DEFAULT_HOSTFILE
        self.hostfile = hostfile
        self.hosts = read_hostfile(Path(hostfile)) if hostfile else []
        self.slots = {host.name: _slots(host) for host in self.hosts}
        if not self.hosts:
            ranks = option(command, "--num_gpus") or "1"
            self.hosts, self.slots = [Host("localhost", "slots=1")], {"localhost": int(ranks)}
        self.num_nodes = int(given("num_nodes") or 0)
        self.port, self.ssh_port = int(given("master_port") or DEFAULT_PORT), given("ssh_port")
        self.master_addr, self.deep = given("master_addr"), arguments.deep
        self.seconds = max(arguments.timeout, DEEP_SECONDS if self.deep else 0.0)

    def findings(self) -> list[Finding]:
        """Visit the hosts, and return the lines of the table."""
        found = self._asked_for() + self._environment()
        with (
            ThreadPoolExecutor(max(len(self.hosts), 1)) as self.pool,
            contextlib.ExitStack() as end,
        ):
            self.sessions = {}
            for host in self.hosts:
                session = Session(host, self.ssh_port and str(self.ssh_port))
                end.callback(session.close)
                self.sessions[host.name] = session
            facts, bad = self._each(self._facts)
            found += [
                Finding("reachable", name, RED, problem, _unreachable_fix(name, problem))
                for name, problem in bad.items()
            ]
            if not facts:
                return found
            if not bad:
                found.append(Finding("reachable", ALL, OK, f"{len(facts)} host(s) answer"))
            self.sessions = {name: self.sessions[name] for name in facts}
            slots = {name: self.slots[name] for name in facts}
            run = Run(slots, checkpoint_bytes(self.settings), self._operators, self.deep)
            found += compare(facts, run)
            found += self._shared_directory() + self._all_reduce(facts)
        return found

    # ---- One host

    def _facts(self, name: str) -> dict[str, Any]:
        session = self.sessions[name]
        clock = session.clock_offset(self.seconds)
        found = session.ask(self.seconds, "facts", flags=self.flags, deep=self.deep, port=self.port)
        return {**found, "clock": clock}

    def _each(self, ask: Callable[[str], Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask all hosts at once; return (answers, problems) by host."""

        def one(name: str) -> tuple[bool, Any]:
            try:
                return True, ask(name)
            except HostError as error:
                return False, str(error)

        pairs = list(zip(self.sessions, self.pool.map(one, self.sessions), strict=True))
        answers = {name: value for name, (well, value) in pairs if well}
        return answers, {name: value for name, (well, value) in pairs if not well}

    # ---- All hosts

    def _asked_for(self) -> list[Finding]:
        if self.num_nodes <= len(self.hosts):
            return []
        text = f"{self.num_nodes} nodes were asked for, {self.hostfile or 'this host'} gives"
        fix = f"add the missing hosts, or ask for --num_nodes {len(self.hosts)}"
        return [Finding("hosts", ALL, RED, f"{text} {len(self.hosts)}", fix)]

    def _environment(self) -> list[Finding]:
        """Look for secrets that DeepSpeed would write onto ssh's command line."""
        return [
            Finding(
                "environment", "this host", RED,
                f"{file}: {name} would stand on the command line of every host",
                "remove it; wandb login and ~/.aws/credentials on the first host hold such things",
            )
            for file, names in environment_files().items() for name in names if looks_secret(name)
        ]  # fmt: skip

    def _operators(self, kind: str) -> list[str]:
        return needed_operators(self.settings, kind)

    def _shared_directory(self) -> list[Finding]:
        run_dir = self.settings.run_dir
        if run_dir is None or len(self.sessions) == 1:
            return []
        first, name = next(iter(self.sessions)), f".doctor-{secrets.token_hex(8)}"

        def ask(host: str, do: str) -> bool:
            return self.sessions[host].ask(
                self.seconds, "token", run_dir=str(run_dir), name=name, do=do
            )

        try:
            ask(first, "write")
            seen, bad = self._each(lambda host: ask(host, "see"))
            ask(first, "remove")
        except HostError as error:
            return [Finding("run_dir", first, RED, str(error), "make it writable there")]
        fix = "use a file system that all hosts share"
        missing = [host for host, sees in seen.items() if not sees]
        found = [
            Finding("run_dir", host, RED, f"{run_dir}: does not see what {first} writes", fix)
            for host in missing
        ]
        found += [Finding("run_dir", host, RED, problem, fix) for host, problem in bad.items()]
        return found or [Finding("run_dir", ALL, OK, f"{run_dir}: shared")]

    def _all_reduce(self, facts: dict[str, Any]) -> list[Finding]:
        alone = len(facts) == 1
        ranks = {
            name: min(self.slots[name], fact["devices"]["count"]) or 1
            if fact["devices"]["kind"] != "cpu" else 2 if alone else 1
            for name, fact in facts.items()
        }  # fmt: skip
        first, fact = next(iter(facts.items()))
        address = self.master_addr or (
            "127.0.0.1" if alone else next(iter(fact["addresses"]), first)
        )
        firsts = dict(zip(ranks, _running_sums(list(ranks.values())), strict=True))

        def ask(name: str) -> Any:
            return self.sessions[name].ask(
                ALL_REDUCE_SECONDS + 30, "all_reduce", ranks=ranks[name], first=firsts[name],
                world=sum(ranks.values()), address=address, port=fact["free_port"],
                seconds=ALL_REDUCE_SECONDS,
            )  # fmt: skip

        answers, bad = self._each(ask)
        bad |= {
            name: next(iter(said["error"] for said in every if "error" in said))
            for name, every in answers.items() if any("error" in said for said in every)
        }  # fmt: skip
        fix = "name the network in .deepspeed_env (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and "
        fix += f"open the ports between the hosts to {address}"
        found = [Finding("all-reduce", name, RED, problem, fix) for name, problem in bad.items()]
        found += [
            Finding("all-reduce", name, RED, "a wrong sum", "test its memory and its network")
            for name, every in answers.items()
            if name not in bad and not all(said["correct"] for said in every)
        ]
        if found:
            return found
        rate = min(said["bytes_per_second"] for every in answers.values() for said in every)
        size = next(iter(answers.values()))[0]["bytes"]
        text = f"{sum(ranks.values())} ranks, {shown_bytes(size)}: correct, {shown_bytes(rate)}/s"
        return [Finding("all-reduce", ALL, OK, text)]


def checkpoint_bytes(settings: Settings) -> int | None:
    """Return the bytes of a checkpoint of the run, None where its configs do not tell."""
    if settings.model_config is None or settings.deepspeed_config is None:
        return None
    from zerolm import architecture, ds_config, memory

    try:
        config = architecture.load_model_config(settings.model_config)
        profile = ds_config.load_ds_config(settings.deepspeed_config)
        shapes = architecture.parameter_shapes(config)
    except ConfigError:
        return None
    return memory.checkpoint_bytes(shapes, profile)


def needed_operators(settings: Settings, kind: str) -> list[str]:
    """Return the names of DeepSpeed's operators that a profile compiles on first use."""
    from zerolm import ds_config

    try:
        profile = ds_config.load_ds_config(settings.deepspeed_config or "")
    except ConfigError:
        return []
    needed = ["deepspeed_shm_comm"] if kind == "cpu" else []
    optimizer = ds_config.optimizer_type(profile).lower()
    optimizer = {"adamw": "adam"}.get(optimizer, optimizer)
    offloads = {ds_config.offload_device(profile, what) for what in ("optimizer", "param")}
    if ds_config.offload_device(profile, "optimizer") != "none":
        if optimizer in ("adam", "adagrad", "lion"):
            needed.append(f"cpu_{optimizer}")
    elif kind != "cpu" and optimizer in ("adam", "lamb", "lion"):
        needed.append(f"fused_{optimizer}")
    return needed + (["async_io"] if "nvme" in offloads else [])


def _slots(host: Host) -> int:
    number = host.slots.removeprefix("slots=")
    if not number.isdigit() or int(number) < 1:
        raise ConfigError(f"hostfile: {host.name} {host.slots}, must have slots of 1 or more.")
    return int(number)


def _running_sums(numbers: Sequence[int]) -> list[int]:
    return [sum(numbers[:place]) for place in range(len(numbers))]


def _unreachable_fix(name: str, problem: str) -> str:
    if "exit code 255" in problem or "no answer" in problem:  # ssh's own
        return f"start it; try: ssh -o BatchMode=yes {name} true; or take it out of the hostfile"
    return (
        f"{Path.cwd()} and {sys.executable} must be there at the same path: "
        f"bash launch/setup.sh on {name}"
    )
