"""The collectives that this rank has entered and finished in each process group.

The information is read from torch, which numbers the collectives in a group and records them in its
flight recorder, for both Gloo and NCCL and for all libraries that call them. It adds no overhead to
collectives. An NCCL collective is only enqueued on the device, and the rank then waits elsewhere,
for example in `.tolist()`; the numbers show which rank it waits for. Does not import torch.
"""

import contextlib
import io
import json
import math
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from zerolm.run_dir.files import RunFiles
from zerolm.watchdog.progress import Group

MAX_CALLS = 512  # maximum number of calls in a heartbeat
Call = tuple[str, int, str]  # (process group, sequence number, kind and size)
# Collectives whose sizes may differ between ranks.
TRANSFERS = "pipeline transfers"  # description of groups in which ranks only send and receive
UNEVEN = ("alltoall", "all_to_all", "gather", "scatter", "send", "recv")
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class _Data(pickle.Unpickler):
    """Unpickles torch's own lists and dicts without running other code."""

    def find_class(self, module: str, name: str) -> Any:
        if module != "torch.jit._pickle":
            raise pickle.UnpicklingError(f"{module}.{name}, which is not data")
        return super().find_class(module, name)


def collectives(with_calls: bool = False) -> tuple[dict[str, Group], list[Call]]:
    """Return the collectives in those process groups of this rank that contain several ranks.

    Args:
        with_calls: also read the flight recorder, which takes a few milliseconds.

    Returns:
        ({group: its collectives}, the last calls, oldest first). Both are empty if torch does not
        record collectives. A group's key consists of its name and first rank, and is identical on
        all ranks in the group.
    """
    groups: dict[str, Group] = {}
    calls: list[Call] = []
    names: dict[str, str] = {}
    for process_group, ranks in _members().items():
        # Neighbours in a pipeline take part in different numbers of transfers.
        if len(ranks) > 1 and process_group.group_desc != TRANSFERS:
            name = f"{process_group.group_name}/{ranks[0]}"
            with contextlib.suppress(RuntimeError):  # not every backend counts
                entered = process_group._get_sequence_number_for_group()
                groups[name] = Group(entered=entered, finished=None, started=None)
                names[process_group.group_name] = name
    for entry in _entries() if with_calls else []:
        name = names.get(entry["process_group"][0], "")
        if not name or entry["is_p2p"]:
            continue
        group, number, call = groups[name], entry["collective_seq_id"], describe(entry)
        if calls and calls[-1][:2] == (name, number):  # calls coalesced into one collective
            call = f"{calls.pop()[2]}, {call}"
        calls.append((name, number, call))
        if group["finished"] is None:
            group["finished"] = number - 1
        done = entry["retired"] or entry["state"] == "completed"
        if done and group["finished"] == number - 1:
            group["finished"] = number
        if entry["time_discovered_started_ns"]:  # only set for NCCL, if it records times
            group["started"] = number
    return groups, calls[-MAX_CALLS:]


def keep(files: RunFiles, token: str | None, rank: int, remove_others: bool) -> None:
    """Write the flight recorder's records, including stacks, to a file for `torchfrtrace`.

    Args:
        token: identifies this start of the run; if None, nothing is written.
        remove_others: whether to remove the files from other starts.
    """
    if token is None:
        return
    prefix = files.flight_recorder(token)
    with contextlib.suppress(Exception):  # the rank exits afterwards in any case
        for path in files.flight_recorders() if remove_others else []:
            if not path.name.startswith(prefix.name):
                path.unlink(missing_ok=True)
        for recorder in _recorders("_dump_nccl_trace", "_dump_fr_trace"):
            content = recorder(includeCollectives=True, includeStackTraces=True, onlyActive=False)
            if b"collective_seq_id" in content:
                trace = _Data(io.BytesIO(content)).load()
                for group, ranks in _members().items():  # Gloo does not record the groups
                    known = {"name": group.group_name, "desc": group.group_desc}
                    trace["pg_config"].setdefault(group.group_name, known | {"ranks": str(ranks)})
                prefix.with_name(f"{prefix.name}{rank}").write_bytes(pickle.dumps(trace))
                return


def write_to(prefix: Path) -> None:
    """Make torch's own watchdog write its flight recorder to the path `prefix` + rank.

    torch writes the file when a process group times out, which requires a timeout shorter than
    `--hang_timeout`.
    """
    if not any(name in os.environ for name in FILE_VARIABLES):
        os.environ[FILE_VARIABLES[0]] = str(prefix)


def _members() -> dict[Any, list[int]]:
    """Return {process group: sorted ranks} for the groups that contain this rank."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return {}
    # This API is private to torch, and groups may be created meanwhile.
    with contextlib.suppress(Exception):
        world = torch.distributed.distributed_c10d._world
        return {group: sorted(world.pg_group_ranks[group]) for group in list(world.pg_map)}
    return {}


def _recorders(*names: str) -> list[Any]:
    """Return those of the named torch functions that exist (a build may lack NCCL's).

    Also select this rank's device, since the functions query CUDA events. The watchdog's thread
    starts on device 0, where each rank on the host would otherwise create a context of half a
    gigabyte.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    module = sys.modules.get("torch._C._distributed_c10d")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def _entries() -> list[dict[str, Any]]:
    """Return the flight recorder's records, oldest first; [] if the recorder is disabled."""
    entries: list[dict[str, Any]] = []
    with contextlib.suppress(Exception):  # a private API of torch
        for recorder in _recorders("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            found = json.loads(recorder(includeCollectives=True, onlyActive=False))
            entries += found.get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def describe(entry: dict[str, Any]) -> str:
    """Return a call's kind and size, which must be the same on all ranks in its group."""
    kind = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    if not sizes or any(kind.lstrip("_").startswith(name) for name in UNEVEN):
        return kind
    count = sum(math.prod(size) for size in sizes)
    return f"{kind} of {count} {dtypes[0]}"
