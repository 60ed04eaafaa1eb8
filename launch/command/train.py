"""`zerolm train`: `deepspeed [launcher's flags] pretrain.py [pretrain.py's flags]` in one command.

No launcher flag has the name of a pretrain.py flag, so they may be mixed.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.command.hosts import (
    keep_alive,
    mpi_problems,
    read_hostfile,
    ssh_problems,
    started_slots,
    used_hosts,
    visible_devices,
)
from zerolm.common import process_tree, processes
from zerolm.common.errors import ConfigError
from zerolm.common.machine import DEFAULT_HOSTFILE
from zerolm.common.process_tree import RUNNER
from zerolm.common.secrets import has_credentials
from zerolm.common.shipped import SCRIPT, module_command
from zerolm.engine.launcher_options import ALIASES, DEFAULT_PORT, LAUNCHER_FLAGS, SHORT, rank_start
from zerolm.parts.parse import add_all_settings, answer, parse_settings

USAGE = """\
zerolm train [launcher flags] --deepspeed_config FILE --model_config FILE
           --data PATH[=WEIGHT] --run_dir PATH [flags]"""
PROGRAMS = ("zerolm", "launch")
CHOOSE_DEVICES = ("num_gpus", "num_nodes", "hostfile", "include", "exclude")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to the help; `run` does its own parsing."""
    add_launcher_flags(parser.add_argument_group("DeepSpeed's launcher"), LAUNCHER_FLAGS)
    add_all_settings(parser)


def add_launcher_flags(
    parser: argparse._ActionsContainer, names: Iterable[str], **defaults: Any
) -> None:
    """Add flags of DeepSpeed's launcher to a parser; `defaults` are default values by name."""
    for name in names:
        flag = LAUNCHER_FLAGS[name]
        value: dict[str, Any] = {"action": "store_true"}
        if flag.metavar:
            value = {"metavar": flag.metavar, "type": flag.read, "default": defaults.get(name)}
        parser.add_argument(f"--{name}", help=flag.help, **value)


def run(argv: Sequence[str]) -> int:
    """Run the launcher, or pretrain.py itself for `--check`; return the exit code."""
    answer(argv, USAGE, add_flags)
    launcher, flags = split_flags(_without_credentials(argv))
    settings, problems = parse_settings(flags, LAUNCHER_FLAGS)
    problems += _host_problems(launcher, flags)
    try:
        rank_start(launcher)
    except ConfigError as error:
        problems += error.problems
    if settings.check and settings.world_size is None:
        flags += _world_size(launcher, problems)
    if problems:
        raise ConfigError(problems)
    if settings.check:
        os.execv(sys.executable, [sys.executable, str(SCRIPT), *flags])
    command = deepspeed_command(argv)
    if _hostfile(launcher):  # the multi-node launcher stops the ranks itself
        keep_alive(os.environ)
        os.execv(sys.executable, command)
    visible_devices({flag[2:].partition("=")[0]: flag for flag in launcher})
    return _run_launcher(command)


def _run_launcher(command: Sequence[str]) -> int:
    """Run the launcher on this host, and return its exit code.

    Signals are forwarded to the ranks, which save and stop. On Ctrl-C, the launcher would exit with
    a traceback and kill W&B's service, so it runs outside the terminal's process group.
    """
    launcher: subprocess.Popen[bytes] | None = None
    received: list[int] = []
    early: list[int] = []  # signals that arrived before there were ranks

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        if launcher is None:
            return
        node_launchers, ranks = process_tree.below(launcher.pid)
        early.extend([] if ranks else [number])
        for pid in ranks or [*node_launchers, launcher.pid]:
            is_started = processes.handles_signal(pid, signal.SIGTERM)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number if ranks and is_started else signal.SIGTERM)

    for number in processes.stop_signals():
        signal.signal(number, forward)
    launcher = subprocess.Popen(command, preexec_fn=os.setpgrp)
    if received:
        forward(received.pop(), None)
    code = launcher.wait()
    if early:  # the launcher may have started ranks after it was asked for them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGTERM)
    # DeepSpeed's launcher may exit with the negated number of the signal that killed a rank.
    ended_by = -code if code < 0 else 256 - code if code > 192 else code - 128
    if received and ended_by == signal.SIGTERM:  # sent by `forward`, as nothing was to be saved
        ended_by = received[0]
    return 128 + ended_by if code < 0 or code > 128 else code


def deepspeed_command(argv: Sequence[str]) -> list[str]:
    """Return the command that runs DeepSpeed's launcher with the flags given to `zerolm train`."""
    launcher, flags = split_flags(argv)
    if not any(flag.startswith(("--log_level", "--quiet")) for flag in launcher):
        launcher.append("--log_level=error")
    launcher = _for_mpirun(launcher)
    return module_command(RUNNER, *launcher, SCRIPT, *flags)


def run_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command that follows `--`.

    `zerolm train` and `deepspeed` are replaced by the Python command that they would run.
    """
    command = _without_credentials(arguments.run_command or [])
    for place in (1, 3):  # zerolm train, python -m zerolm train
        if command[place : place + 1] == ["train"] and Path(command[place - 1]).name in PROGRAMS:
            return deepspeed_command(command[place + 1 :])
    if command and shutil.which(command[0]) == str(Path(sys.executable).with_name("deepspeed")):
        return module_command(RUNNER, *command[1:])
    return command


def _without_credentials(argv: Sequence[str]) -> list[str]:
    """Return the command unchanged; refuse it if it contains credentials.

    The launcher would print them.
    """
    if problems := [
        f"command line: {word}: contains credentials, which the launcher, job files and process "
        f"listings would expose. Put them in the environment or in the configuration of the "
        f"store's library."
        for word in argv
        if has_credentials(word)
    ]:
        raise ConfigError(problems)
    return list(argv)


def _hostfile(launcher: Sequence[str]) -> str:
    """Return the path of the hostfile that a launch uses, or "" if it uses this host alone."""
    given = dict(flag[2:].partition("=")[::2] for flag in launcher)
    default = DEFAULT_HOSTFILE if Path(DEFAULT_HOSTFILE).is_file() else ""
    return given.get("hostfile", default)


def _for_mpirun(launcher: Sequence[str]) -> list[str]:
    """Return the launcher's flags, extended for `--launcher openmpi`.

    The rendezvous address of the ranks is added, and core binding is turned off: by default,
    `mpirun` binds a rank and its loader workers to one core.
    """
    given = dict(flag[2:].partition("=")[::2] for flag in launcher)
    if given.get("launcher", "").lower() != "openmpi":
        return list(launcher)
    arguments = given.get("launcher_args", "").split(" ")
    if not any("MASTER_ADDR" in word for word in arguments):
        address = given.get("master_addr") or read_hostfile(Path(_hostfile(launcher)))[0].name
        port = given.get("master_port", str(DEFAULT_PORT))
        arguments += ["-x", f"MASTER_ADDR={address}", "-x", f"MASTER_PORT={port}"]
    if not any("-bind-to" in word or "-map-by" in word for word in arguments):
        arguments += ["--bind-to", "none"]
    kept = [flag for flag in launcher if not flag.startswith("--launcher_args=")]
    return [*kept, f"--launcher_args={' '.join(arguments).strip()}"]


def _host_problems(launcher: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the problems with launching on the hosts of the hostfile; none without a hostfile."""
    given = dict(flag[2:].partition("=")[::2] for flag in launcher)
    hostfile, runner = _hostfile(launcher), given.get("launcher", "pdsh").lower()
    if not hostfile:
        return []
    if problems := mpi_problems(runner, given):
        return problems
    try:
        several = used_hosts(hostfile, given.get("num_nodes")) > 1
    except ConfigError as error:
        return error.problems
    if "no_ssh" in given or not several or "@" not in given.get("include", "@"):
        return []
    return ssh_problems(flags, runner)


def _world_size(launcher: Sequence[str], problems: list[str]) -> list[str]:
    """Return the `--world_size` flag to add for `--check`, computed from the launcher's flags.

    If it cannot be computed from them, append to `problems` and return no flag.
    """
    given = dict(flag[2:].partition("=")[::2] for flag in launcher)
    if hostfile := _hostfile(launcher):
        try:
            slots = {host.name: host.num_slots for host in read_hostfile(Path(hostfile))}
            used_hosts(hostfile, given.get("num_nodes"))
            return ["--world_size", str(sum(started_slots(slots, given).values()))]
        except ConfigError as error:
            problems += [each for each in error.problems if each not in problems]
            return []
    chosen = [name for name in CHOOSE_DEVICES if name in given]
    if not chosen and not problems and (visible := visible_devices({})):
        return ["--world_size", str(len(visible))]
    sizes = [given.get("num_gpus", ""), given.get("num_nodes", "1")]
    if not set(chosen) - {"num_gpus", "num_nodes"} and all(size.isdecimal() for size in sizes):
        return ["--world_size", str(int(sizes[0]) * int(sizes[1]))]
    problems += [
        f"command line: --{name}: --check does not start the launcher, which would count the "
        f"devices. Add --world_size N."
        for name in chosen
    ]
    return []


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into (launcher flags as `--name=value`, arguments for pretrain.py)."""
    launcher: list[str] = []
    rest: list[str] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        written, equals, value = SHORT.get(argument, argument).partition("=")
        name = written[2:].replace("-", "_")
        name = ALIASES.get(name, name)
        if not written.startswith("--") or name not in LAUNCHER_FLAGS:
            rest.append(argument)
            continue
        if LAUNCHER_FLAGS[name].metavar and not equals:
            if not arguments:
                raise ConfigError(f"command line: {written} needs a value. Add it.")
            value = arguments.pop(0)
        launcher.append(f"--{name}={value}" if LAUNCHER_FLAGS[name].metavar else f"--{name}")
    return launcher, rest
