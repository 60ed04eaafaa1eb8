#!/usr/bin/env bash
# torch 2.13.0, gloo: a group's sequence number counts send and recv like collectives, so ranks that
# have run the same collectives have different numbers as soon as two of them have exchanged a
# tensor. A watchdog that takes the rank with the lower number for the one that is behind blames
# a stage of a pipeline that merely sends less. A second group for transfers keeps the numbers equal.
# Seen: after all_reduce, a transfer from rank 0 to 1, barrier: [3, 3, 2]; with a second group: [2, 2, 2]
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
cat >"$folder/ranks.py" <<'PY'
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing


def numbers(rank: int, group: dist.ProcessGroup, transfers: dist.ProcessGroup) -> list[int]:
    """Return each rank's number for `group` after two collectives, and a transfer in `transfers`."""
    value = torch.zeros(1)
    dist.all_reduce(value, group=group)
    if rank == 0:
        dist.send(value, 1, group=transfers)
    if rank == 1:
        dist.recv(value, 0, group=transfers)
    dist.barrier(group=group)
    found = [None] * 3
    dist.all_gather_object(found, group._get_sequence_number_for_group())
    return found


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    one, other, transfers = (dist.new_group(list(range(3))) for _ in range(3))
    together, apart = numbers(rank, one, one), numbers(rank, other, transfers)
    if rank == 0:
        print(f"numbers of three ranks, transfer in the same group: {together}, in another: {apart}")
    dist.destroy_process_group()
    sys.exit(not (len(set(together)) > 1 and len(set(apart)) == 1))


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(tempfile.mktemp(),), nprocs=3)
PY
timeout 120 "$folder/venv/bin/python" "$folder/ranks.py"
