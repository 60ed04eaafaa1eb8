"""What the ranks say to each other. Torch is imported by need: preflight runs before any of it."""

import contextlib
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolm.errors import ConfigError

REFUSAL_WAIT_SECONDS = 20


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
    too, a little later.
    """
    if rank == 0:
        print(f"pretrain.py: refused, nothing was written.\n{error}", file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSAL_WAIT_SECONDS if local_rank else REFUSAL_WAIT_SECONDS / 4)
        where = f"rank {rank} on {socket.gethostname()}"
        print(f"pretrain.py: refused, {where}.\n{error}", file=sys.stderr, flush=True)
    return error.exit_code


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


def say(rank: int, *words: object) -> None:
    """Print on rank 0. Whoever reads it may be gone; that is not the run's end."""
    if rank == 0:
        with contextlib.suppress(BrokenPipeError):
            print(*words, flush=True)


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
