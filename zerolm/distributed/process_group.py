"""The life cycle of a rank's process group: rendezvous with all hosts, creation, destruction, exit.

Preflight runs before torch is loaded, so torch is imported inside the functions that need it.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from zerolm.common import machine, processes
from zerolm.common.command_line import flush_output
from zerolm.common.errors import ConfigError
from zerolm.distributed import collectives, ranks
from zerolm.engine import operators, shared_memory

REFUSAL_DELAY_SECONDS = 20
# torch's own timeout for process groups; rank 0 may first download a run to restore.
RENDEZVOUS_TIMEOUT_SECONDS = 1800
DEPARTURE_TIMEOUT_SECONDS = 30
# The watchdog stops a hanging run and names the rank. NCCL's own timeout, which is 10 minutes by
# default like --hang_timeout, aborts all ranks, so it must not expire first.
GROUP_TIMEOUT = timedelta(days=1)
_first_rank: tuple[str, processes.Process | None] | None = None  # machine id and process of rank 0
# The TCP store shared by all ranks, followed by one prefix store for each rendezvous.
_stores: list[Any] = []


def environment_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Return (rank, local rank, world size) from the launcher's environment variables."""
    found = ranks.of_environment(environment)
    return found.rank, found.local_rank, found.size


# -------------------------------------------------------------------------------------------------
# Before the process group exists


class SharedConfigError(ConfigError):
    """A configuration error that every rank on every host raises."""


def report_config_error(error: ConfigError, rank: int, local_rank: int) -> int:
    """Print a configuration error once per run and return its exit code.

    Call this only before the process group exists. The launcher kills all ranks on a host as soon
    as one of them exits, so rank 0 prints and exits at once, while other ranks wait. So a problem
    that all ranks have is printed once, and a problem that only another rank has is printed after
    that rank has waited. Ranks on other hosts are notified in `rendezvous`, because no launcher
    would stop them.
    """
    if not isinstance(error, SharedConfigError):
        try:
            rendezvous(error.problems)
        except SharedConfigError as shared:
            error = shared
    if isinstance(error, SharedConfigError):
        if rank == 0:
            print(f"pretrain.py: refused, nothing was written.\n{error}", file=sys.stderr)
        return error.exit_code
    if rank == 0:
        print(f"pretrain.py: refused, nothing was written.\n{error}", file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSAL_DELAY_SECONDS if local_rank else REFUSAL_DELAY_SECONDS / 4)
        where = f"rank {rank} on {socket.gethostname()}"
        print(f"pretrain.py: refused, {where}.\n{error}", file=sys.stderr, flush=True)
    return error.exit_code


def rendezvous(problems: Sequence[str] = ()) -> None:
    """Wait for all hosts' ranks; if any rank has a problem, raise the same error on all ranks.

    If only one rank exited, ranks on other hosts would keep waiting, because a launcher stops only
    the ranks on its own host. Every rank must call this the same number of times. On a single host,
    it does nothing. The process group is later created over the same store, so the store's port is
    never released in between. `problems` are the problems of this rank only.

    Raises:
        SharedConfigError: on every rank, if any rank has a problem or does not arrive in time.
    """
    rank, _, world_size = environment_rank()
    if not _stores and machine.num_hosts(os.environ) == 1:
        return
    import torch

    if not _stores:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        first = torch.distributed.TCPStore(
            address, port, is_master=rank == 0, wait_for_workers=False,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_SECONDS),
        )  # fmt: skip
        # Makes torch join this store instead of opening its own.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        _stores.append(first)
    store = torch.distributed.PrefixStore(f"rendezvous {len(_stores)}", _stores[0])
    _stores.append(store)
    if problems:
        number = store.add("refused", 1)
        store.set(f"refused {number}", json.dumps([socket.gethostname(), *problems]))
    if store.add("arrived", 1) == world_size:
        store.set("all arrived", "")
    try:
        store.wait(["all arrived"])
    except RuntimeError:
        raise SharedConfigError(
            f"only {store.add('arrived', 0)} of {world_size} ranks started within "
            f"{RENDEZVOUS_TIMEOUT_SECONDS // 60} minutes. Check the hosts: zerolm doctor."
        ) from None
    hosts_of: dict[str, list[str]] = {}  # {problem: hosts that reported it}
    for number in range(1, store.add("refused", 0) + 1):
        host, *lines = json.loads(store.get(f"refused {number}"))
        for line in lines:
            hosts_of.setdefault(line, []).append(host)
    if not hosts_of:
        return
    deadline = time.monotonic() + DEPARTURE_TIMEOUT_SECONDS
    while store.add("left", int(rank != 0)) < world_size - 1 and rank == 0:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)  # rank 0 hosts the store, so it must exit last
    raise SharedConfigError(
        [f"{line} (on {', '.join(dict.fromkeys(hosts))})" for line, hosts in hosts_of.items()]
    )


# -------------------------------------------------------------------------------------------------
# From creation to exit


def init() -> tuple[int, int, Any]:
    """Create the process group. Every rank must call this.

    Returns:
        (rank, world size, torch.device) of this process.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch.distributed import distributed_c10d

    accelerator = get_accelerator()
    _, local_rank, _ = environment_rank()
    operators.guard_builds(collectives.print_safely if local_rank == 0 else lambda line: None)
    if "RANK" not in os.environ:  # plain `python pretrain.py`: a single rank
        port = os.environ.get("MASTER_PORT", str(machine.free_port()))
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if accelerator.device_name() == "cpu":
        device = torch.device("cpu")
        shared_memory.prepare(local_rank)
    else:
        device = torch.device(accelerator.device_name(local_rank))
        accelerator.set_device(local_rank)
    # DeepSpeed creates further groups without passing a timeout, so they use these defaults.
    distributed_c10d.default_pg_timeout = GROUP_TIMEOUT
    distributed_c10d.default_pg_nccl_timeout = GROUP_TIMEOUT
    deepspeed.init_distributed(timeout=GROUP_TIMEOUT, verbose=False)
    collectives.barrier()
    shared_memory.release()
    global _first_rank
    own = processes.machine_id(), processes.inspect_process(os.getpid())
    _first_rank = collectives.broadcast_object(own)
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), device


def destroy(close: Callable[[], object] = lambda: None) -> None:
    """Close everything that uses the process group, and destroy the group. All ranks call this.

    Begins with a barrier: without the barrier and without destroying the group, Gloo aborted the
    interpreter in about 1 of 20 runs (DeepSpeed 0.19.8, torch 2.13, 2 ranks on a CPU).
    """
    import torch

    if not torch.distributed.is_initialized():
        return
    collectives.barrier()
    close()
    with contextlib.suppress(ValueError):  # DeepSpeed's engine may have destroyed its groups
        torch.distributed.destroy_process_group()


def waits_for_rank0() -> bool:
    """Return whether rank 0 is still running as another process on this machine."""
    machine_of_rank0, process = _first_rank or ("", None)
    if process is None or process.pid == os.getpid() or machine_of_rank0 != processes.machine_id():
        return False
    return processes.alive(process)


def exit_process(code: int) -> NoReturn:
    """Run the exit handlers, and exit with a code but without interpreter teardown.

    During teardown, Gloo threads that DeepSpeed's groups keep alive may still need the interpreter.
    C++ then aborts the process: "terminate called without an active exception", exit code -6 after
    a completed run (about 1 of 100 launches, torch 2.13).
    """
    atexit._run_exitfuncs()
    flush_output()
    sys.stderr.flush()
    os._exit(code)
