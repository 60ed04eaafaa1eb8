"""Collective operations on Python objects and tensors, and functions that print on rank 0.

Preflight runs before torch is loaded, so torch is imported inside the functions that need it.
"""

import contextlib
import socket
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.common.secrets import masked
from zerolm.common.values import printable


def print_safely(*values: object) -> None:
    """Print values with secrets and control characters hidden, and ignore output errors.

    A closed terminal or a full disk must not end a run.
    """
    with contextlib.suppress(OSError):
        print(printable(masked(" ".join(map(str, values))), "\n\t"), flush=True)


def print_rank0(rank: int, *values: object) -> None:
    """Print on rank 0 only."""
    if rank == 0:
        print_safely(*values)


def barrier() -> None:
    """Wait for every rank. Every rank must call this."""
    import torch

    if torch.distributed.get_world_size() > 1:  # torch would warn about a group without a device
        torch.distributed.barrier()


def print_communication_table() -> None:
    """Print the table of DeepSpeed's `comms_logger` on rank 0. Every rank must call this."""
    import deepspeed.comm

    deepspeed.comm.log_summary()


def require_on_all_ranks(condition: bool, problem: str) -> None:
    """Raise the same ConfigError on every rank unless `condition` is true on all ranks.

    Every rank must call this.

    Args:
        problem: this rank's message, used if `condition` is false on this rank.
    """
    reported = gather_objects(None if condition else f"{problem} (on {socket.gethostname()})")
    problems = list(dict.fromkeys(line for line in reported if line is not None))
    if problems:
        raise ConfigError(problems)


def require_same_on_all_ranks(value: Any, problem: str) -> None:
    """Raise a ConfigError on every rank unless all pass an equal `value`. All ranks call this."""
    require_on_all_ranks(value == broadcast_object(value), problem)


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's `value`, in rank order, on every rank. Every rank must call this."""
    import torch

    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def gather_on_rank0(value: Any) -> list[Any] | None:
    """Return every rank's `value` on rank 0, and None on other ranks. Every rank must call this."""
    import torch

    first = torch.distributed.get_rank() == 0
    values: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
    torch.distributed.gather_object(value, values)
    return values


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank. Every rank must call this."""
    import torch

    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def sum_over_ranks(values: Any) -> Any:
    """Sum a tensor over all ranks in place and return it. Every rank must call this."""
    import torch

    torch.distributed.all_reduce(values)
    return values
