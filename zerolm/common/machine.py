"""What this machine is and how the run was started: devices, launcher, directories, accounts.

Everything is looked at and nothing is changed. torch and DeepSpeed are imported by need.
"""

import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DEFAULT_HOSTFILE = "/job/hostfile"  # deepspeed/launcher/runner.py, DLTS_HOSTFILE
RUNNER_NAMES = ("deepspeed", "deepspeed.launcher.runner", "ds")
STALE_BUILD_SECONDS = 600  # one source file of an operator compiles in well under this
ASSUMED_DEVICE_BYTES = 80 << 30  # with --check --world_size, for devices that are not here


class Device(NamedTuple):
    """The accelerator of this rank.

    Attributes:
        kind: DeepSpeed's name: `cpu`, `cuda`, ...
        memory_bytes: in all, not free: what is free differs from rank to rank, and all ranks must
            come to the same plan. None on a CPU.
        supports_bf16: as the accelerator says.
    """

    kind: str
    memory_bytes: int | None
    supports_bf16: bool

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"


def local_device(environment: Mapping[str, str], problems: list[str]) -> Device:
    """Look at the device of this rank, and say which one is missing."""
    wanted = environment.get("DS_ACCELERATOR")
    if wanted == "cuda":
        import torch

        if not torch.cuda.is_available():
            problems.append(
                "environment: DS_ACCELERATOR: cuda, but torch finds no CUDA device. Unset it, or "
                "install a driver and a torch build for CUDA."
            )
            return Device("cpu", None, True)
    logging.disable(logging.WARNING)  # it warns of having found a CPU, which the plan says anyway
    try:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
    finally:
        logging.disable(logging.NOTSET)
    kind = accelerator.device_name()
    if kind == "cpu":
        return Device("cpu", None, True)
    count, local_rank = accelerator.device_count(), int(environment.get("LOCAL_RANK", 0))
    if local_rank >= count:
        problems.append(
            f"environment: LOCAL_RANK: {local_rank}, but this host has {count} {kind} device(s). "
            f"Start at most {count} rank(s) on it: deepspeed --num_gpus {count}, or correct the "
            f"slots in the hostfile."
        )
        return Device(kind, None, True)
    memory = accelerator.total_memory(local_rank)
    return Device(kind, memory, bool(accelerator.is_bf16_supported()))


def build_locks(environment: Mapping[str, str]) -> tuple[list[Path], list[Path]]:
    """Find the locks of operator builds in torch's extension cache: (left behind, maybe in use).

    A rank that was killed while it built an operator leaves its lock, and every later rank waits
    for it, forever and without a word. A build that is alive writes files beside its lock.
    """
    cache = environment.get("XDG_CACHE_HOME", f"{environment.get('HOME', '/nowhere')}/.cache")
    root = Path(environment.get("TORCH_EXTENSIONS_DIR", f"{cache}/torch_extensions"))
    stale: list[Path] = []
    fresh: list[Path] = []
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        try:
            newest = max(path.stat().st_mtime for path in lock.parent.iterdir())
        except (OSError, ValueError):  # a build that ends while we look
            continue
        (stale if time.time() - newest > STALE_BUILD_SECONDS else fresh).append(lock)
    return stale, fresh


def unwritable(run_dir: str | Path) -> str | None:
    """Say why a directory could not be created or written, None if it could.

    Tried with an anonymous file in the nearest directory that exists; nothing remains.
    """
    path = Path(run_dir).absolute()
    while not path.exists() and not path.is_symlink():
        path = path.parent
    if not path.is_dir():
        return f"{path} is not a directory. Remove it, or choose another directory."
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "") + f": {error.strerror}"
        return f"cannot write in {path} ({reason}). Make it writable, or choose another directory."
    return None


def free_bytes(run_dir: str | Path) -> int | None:
    """Return the free bytes of the file system of a directory; None when it does not say."""
    path = Path(run_dir).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def launcher_problem(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Find out whether `deepspeed --num_nodes N` has silently started fewer nodes.

    The runner takes the first N hosts of its hostfile, and goes on with as many as there are. What
    it was asked for stands only on its own command line, so its process is looked up on this host.

    Args:
        argv: our own flags.
        environment: what the node launcher announced (`CROSS_SIZE`: nodes, `WORLD_SIZE`: ranks).
    """
    nodes = num_nodes(environment)
    if nodes is None:
        return None
    ours = [word for word in argv if not word.startswith("--local_rank=")]
    for command in _commands():
        options = _runner_options(command, ours)
        asked = options.get("--num_nodes", "")
        if asked.isdigit() and int(asked) > nodes:
            hostfile = options.get("--hostfile", DEFAULT_HOSTFILE)
            return (
                f"{hostfile}: --num_nodes: {asked} nodes were asked for, but the hostfile gives "
                f"{nodes}. Add the missing hosts to it, or ask for --num_nodes {nodes}."
            )
    return None


def num_nodes(environment: Mapping[str, str]) -> int | None:
    """Return how many nodes the run really has, None when it was not started by a launcher."""
    if environment.get("CROSS_SIZE", "").isdigit():
        return int(environment["CROSS_SIZE"])
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "")
    if environment.get("WORLD_SIZE", "").isdigit() and local.isdigit() and int(local):
        return int(environment["WORLD_SIZE"]) // int(local)
    return None


def num_hosts(environment: Mapping[str, str]) -> int:
    """Return on how many hosts ranks find each other by themselves, 1 where an agent does that."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True":
        return 1
    return (num_nodes(environment) or 1) if "MASTER_ADDR" in environment else 1


def _commands() -> list[list[str]]:
    """Return the command lines of the processes that can be seen, none where there is no /proc."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:  # it has ended, or is somebody else's
            continue
        commands.append(words)
    return commands


def _runner_options(command: Sequence[str], ours: Sequence[str]) -> dict[str, str]:
    """Return the runner's own options if the command is a runner that started our flags."""
    if len(ours) >= len(command) or list(command[len(command) - len(ours) :]) != list(ours):
        return {}
    head = command[: len(command) - len(ours) - 1]  # without the script
    if not any(Path(word).name in RUNNER_NAMES for word in head):
        return {}
    options = {}
    for number, word in enumerate(head):
        name, equals, value = word.partition("=")
        name = "--hostfile" if name == "-H" else name
        if name in ("--num_nodes", "--hostfile"):
            options[name] = value if equals else "".join(head[number + 1 : number + 2])
    return options


def has_wandb_key(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether W&B can log in without asking: a key in the environment or in netrc."""
    import netrc

    if environment.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc(environment.get("NETRC")).hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def told_wandb_mode(environment: Mapping[str, str] = os.environ) -> str:
    """Return what `WANDB_MODE` says, as W&B reads it: online, offline, disabled; empty: nothing."""
    word = environment.get("WANDB_MODE", "").strip()
    word = {"dryrun": "offline", "run": "online"}.get(word, word)
    return word if word in ("online", "offline", "disabled") else ""
