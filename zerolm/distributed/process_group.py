"""What the ranks say to each other. Torch is imported by need: preflight runs before any of it."""

import atexit
import contextlib
import json
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from zerolm import machine
from zerolm.errors import ConfigError

REFUSAL_WAIT_SECONDS = 20
MEETING_SECONDS = 1800  # torch's own limit for a process group; rank 0 may have a run to restore
LEAVING_SECONDS = 30
_meetings: list[Any] = []  # the store of all ranks, and its part for each meeting so far


def environment_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Return (rank, local rank, world size) as the launcher announced them, without a group."""
    return (
        int(environment.get("RANK", 0)),
        int(environment.get("LOCAL_RANK", 0)),
        int(environment.get("WORLD_SIZE", 1)),
    )


def refuse(error: ConfigError, rank: int, local_rank: int) -> int:
    """Print a refusal once and return its exit code; to be called before any group exists.

    The launcher kills every rank of a host as soon as one has ended, so the first rank ends at once
    and the others wait: what all ranks found is printed once, and what only one found is printed
    too, a little later. Ranks of other hosts are told, since no launcher would end them.
    """
    if not isinstance(error, RefusedTogether):
        try:
            meet(error.problems)
        except RefusedTogether as together:
            error = together
    if isinstance(error, RefusedTogether):
        if rank == 0:
            print(f"pretrain.py: refused, nothing was written.\n{error}", file=sys.stderr)
        return error.exit_code
    if rank == 0:
        print(f"pretrain.py: refused, nothing was written.\n{error}", file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSAL_WAIT_SECONDS if local_rank else REFUSAL_WAIT_SECONDS / 4)
        where = f"rank {rank} on {socket.gethostname()}"
        print(f"pretrain.py: refused, {where}.\n{error}", file=sys.stderr, flush=True)
    return error.exit_code


class RefusedTogether(ConfigError):
    """What any rank of any host refuses. Raised on every rank."""


def meet(problems: Sequence[str] = ()) -> None:
    """Wait for the ranks of all hosts, and end together if one of them refuses to go on.

    A rank that ended alone would leave those of other hosts waiting for it: a launcher ends only
    the ranks of its own host. Every rank must call, equally often; on one host nothing is done. The
    process group is made over the same store, so that its port is never given up in between.

    Args:
        problems: what this rank refuses.

    Raises:
        RefusedTogether: on every rank, if any has problems or does not come.
    """
    rank, _, world_size = environment_rank()
    if not _meetings and machine.num_hosts(os.environ) == 1:
        return
    import torch

    if not _meetings:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        first = torch.distributed.TCPStore(
            address, port, is_master=rank == 0, wait_for_workers=False,
            timeout=timedelta(seconds=MEETING_SECONDS),
        )  # fmt: skip
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch: there is a store, join it
        _meetings.append(first)
    store = torch.distributed.PrefixStore(f"meeting {len(_meetings)}", _meetings[0])
    _meetings.append(store)
    if problems:
        number = store.add("refused", 1)
        store.set(f"refused {number}", json.dumps([socket.gethostname(), *problems]))
    if store.add("arrived", 1) == world_size:
        store.set("all are here", "")
    try:
        store.wait(["all are here"])
    except RuntimeError:
        raise RefusedTogether(
            f"only {store.add('arrived', 0)} of {world_size} ranks began within "
            f"{MEETING_SECONDS // 60} minutes. See what the hosts say: python -m launch doctor."
        ) from None
    found: dict[str, list[str]] = {}
    for number in range(1, store.add("refused", 0) + 1):
        host, *lines = json.loads(store.get(f"refused {number}"))
        for line in lines:
            found.setdefault(line, []).append(host)
    if not found:
        return
    deadline = time.monotonic() + LEAVING_SECONDS
    while store.add("left", int(rank != 0)) < world_size - 1 and rank == 0:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)  # the store goes with rank 0
    raise RefusedTogether(
        [f"{line} (on {', '.join(dict.fromkeys(hosts))})" for line, hosts in found.items()]
    )


def start() -> tuple[int, int, Any]:
    """Create the process group. Every rank must call.

    Returns:
        (rank, world size, torch.device) of this process.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    _, local_rank, _ = environment_rank()
    if "RANK" not in os.environ:  # plain `python pretrain.py`: a world of one
        port = os.environ.get("MASTER_PORT", str(_free_port()))
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if accelerator.device_name() == "cpu":
        device = torch.device("cpu")
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            # DeepSpeed would try to compile this op, and end the run; without it Gloo does the same
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        device = torch.device(accelerator.device_name(local_rank))
        accelerator.set_device(local_rank)
    deepspeed.init_distributed(verbose=False)
    release_shared_memory()
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), device


def release_shared_memory() -> None:
    """Unlink the buffer that DeepSpeed's CPU collectives leave behind. Every rank must call.

    DeepSpeed 0.19.8 makes 69 MB in /dev/shm for each rank of each launch on a CPU, and never
    removes it, so that a machine runs out of memory after some hundred launches. Once all ranks
    have mapped it the name is not needed: unlinked here, it goes with its processes, even killed.
    """
    import torch

    torch.distributed.barrier()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{os.environ['RANK']}"
    with contextlib.suppress(OSError):  # ranks of several hosts, and GPUs, have none
        Path("/dev/shm", name).unlink()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(engine: Any = None) -> None:
    """End the process group in the one order that never aborts at exit. Every rank must call.

    Without the barrier and the destruction, Gloo aborted the interpreter in about one run of
    twenty (DeepSpeed 0.19.8, torch 2.13, 2 ranks on a CPU).
    """
    import torch

    if not torch.distributed.is_initialized():
        return
    torch.distributed.barrier()
    if engine is not None:
        engine.destroy()
    with contextlib.suppress(ValueError):  # the engine may have ended its groups itself
        torch.distributed.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process with a code, after its exit handlers, without tearing down the interpreter.

    While Python tears itself down, threads of Gloo that DeepSpeed's groups keep alive may still
    want the interpreter, and C++ then ends the process: "terminate called without an active
    exception", exit code -6 of a run that was done (one launch of about a hundred, torch 2.13).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tell(*words: object) -> None:
    """Print. Whoever reads it, or its terminal or disk, may be gone; that is not the run's end."""
    with contextlib.suppress(OSError):
        print(*words, flush=True)


def say(rank: int, *words: object) -> None:
    """Print on rank 0."""
    if rank == 0:
        tell(*words)


def barrier() -> None:
    """Wait for every rank. Every rank must call."""
    import torch

    torch.distributed.barrier()


def agree(condition: bool, problem: str) -> None:
    """Raise the same ConfigError on every rank unless all see `condition`. Every rank must call.

    Args:
        problem: what is wrong on this rank, if anything is.
    """
    found = gather_objects(None if condition else f"{problem} (on {socket.gethostname()})")
    problems = list(dict.fromkeys(line for line in found if line is not None))
    if problems:
        raise ConfigError(problems)


def must_be_same(value: Any, problem: str) -> None:
    """Raise a ConfigError on every rank unless all have rank 0's `value`. Every rank must call."""
    agree(value == broadcast_object(value), problem)


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's `value`, in rank order, on every rank. Every rank must call."""
    import torch

    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank. Every rank must call."""
    import torch

    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def sum_over_ranks(values: Any) -> Any:
    """Sum a tensor over all ranks in place and return it. Every rank must call."""
    import torch

    torch.distributed.all_reduce(values)
    return values
