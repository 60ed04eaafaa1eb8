"""The processes of a launch: which one starts which. No other module knows who is whose parent.

Each arrow starts a process, and `[ ]` is there only sometimes.

    deepspeed, zerolm train         [zerolm train >] runner > node launcher > ranks
    zerolm node, on each host       node > runner > node launcher > ranks
    with a hostfile (multinode.sh)  runner > pdsh > ssh
                on each host        sshd > [shell >] node launcher > ranks
    --launcher openmpi              runner > mpirun > ranks of this host
                on other hosts      sshd > [shell >] orted > ranks
    --launcher slurm, srun          [runner >] srun
                on each host        slurmstepd > ranks
    torchrun                        torchrun > ranks
    python pretrain.py              shell > the only rank

A supervised restart on one host, from the imports of the first launch (train/held_imports.py):

                                    holder > its child > runner > node launcher > ranks

The runner is the process of `deepspeed`. Here the parent of ranks is called their node launcher,
whichever program it is: it reaps them, and ends all of its host if one fails. `launch supervise`
and what it starts are found by a mark instead (`processes.marked_pids`), and the processes that a
rank starts follow it by themselves. Reads Linux's /proc. Standard library only.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zerolm.common.processes import PROC, Process, all_pids, children, inspect_process

RUNNER = "zerolm.engine.launcher"
RUNNERS = (RUNNER, "deepspeed.launcher.runner", "deepspeed", "ds")
NODE_LAUNCHER, DEEPSPEED_NODE_LAUNCHER = "zerolm.train.node_launcher", "deepspeed.launcher.launch"
RUNNER_OPTIONS = ("--num_nodes", "--hostfile", "--no_ssh")
PR_SET_PDEATHSIG = 1


class Launch(NamedTuple):
    """The processes above this rank on its host.

    Attributes:
        node_launcher: number of the process that started this rank; None without a launcher, since
            a rank may outlive the shell that started it.
        runner: the `deepspeed` process, if it started the node launcher.
        session: the ssh server's process, if it started the node launcher directly, as with pdsh.
            None if a user's shell did: the user may log out during a start.
    """

    node_launcher: int | None = None
    runner: Process | None = None
    session: Process | None = None

    @classmethod
    def of_this_rank(cls, environment: Mapping[str, str] = os.environ) -> "Launch":
        """Return the processes that have started this one, by the launcher's variables."""
        pid = os.getppid() if "RANK" in environment else None
        parent = inspect_process(pid) if pid else None
        above = inspect_process(parent.parent) if parent else None
        if above is None:
            return cls(pid)
        is_runner = _is_runner(_zero_separated(above.pid, "cmdline"))
        is_session = _read(above.pid, "comm").startswith(b"sshd")
        return cls(pid, above if is_runner else None, above if is_session else None)

    def is_orphaned(self) -> bool:
        """Return whether the node launcher of this rank has ended."""
        return self.node_launcher not in (None, os.getppid())


def starts(runner: Process | None) -> dict[str, int]:
    """Return {process: start time in clock ticks} from the runner, if any, down to this rank."""
    own = inspect_process(os.getpid())
    assert own is not None, "this process is in /proc"
    if runner is None:
        return {"rank": own.start_ticks}
    parent = inspect_process(own.parent)
    # If the node launcher was killed, the parent is process 1, which predates the runner.
    if parent is None or parent.start_ticks <= runner.start_ticks:
        return {"node launcher": runner.start_ticks, "rank": own.start_ticks}
    begun = {"deepspeed": runner.start_ticks, "node launcher": parent.start_ticks}
    return {**begun, "rank": own.start_ticks}


# ---- From outside of the ranks


def below(runner: int) -> tuple[list[int], list[int]]:
    """Return the node launchers that a runner has started on this host, and their ranks."""
    launchers = [child.pid for child in children(runner)]
    return launchers, [rank.pid for launcher in launchers for rank in children(launcher)]


def runner_of(argv: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options and environment of the runner that started ranks with these arguments.

    Both are empty if there is none: it is visible only on the host where it was started.
    """
    flags = [argument for argument in argv if not argument.startswith("--local_rank=")]
    for pid in all_pids():
        if options := _runner_options(_zero_separated(pid, "cmdline"), flags):
            variables = _zero_separated(pid, "environ")
            return options, dict(text.partition("=")[::2] for text in variables)
    return {}, {}


def _runner_options(command: Sequence[str], flags: Sequence[str]) -> dict[str, str]:
    """Return the runner's options if a command starts DeepSpeed's runner for these flags."""
    if len(flags) >= len(command) or list(command[len(command) - len(flags) :]) != list(flags):
        return {}
    head = command[: len(command) - len(flags) - 1]  # the command without the script
    if not _is_runner(head):
        return {}
    options = {}
    for number, argument in enumerate(head):
        name, equals, value = argument.partition("=")
        name = "--hostfile" if name == "-H" else name
        if name in RUNNER_OPTIONS:
            options[name] = value if equals else "".join(head[number + 1 : number + 2])
    return options


def _is_runner(command: Sequence[str]) -> bool:
    return any(Path(argument).name in RUNNERS for argument in command)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent exits; 0 undoes this."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _zero_separated(pid: int, file: str) -> list[str]:
    """Return the strings in a file of a process; [""] if it cannot be read."""
    return _read(pid, file).decode(errors="replace").rstrip("\0").split("\0")


def _read(pid: int, file: str) -> bytes:
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / file).read_bytes()
    return b""
