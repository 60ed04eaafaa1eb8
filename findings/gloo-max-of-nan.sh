#!/usr/bin/env bash
# torch 2.13.0, gloo: all_reduce with MAX or MIN returns NaN or a number depending on which rank has
# the NaN, so a check "is the largest norm finite" on a reduced value can miss it. SUM keeps NaN.
# Seen: NaN on rank 0 of 2: MAX nan, MIN nan, SUM nan; on rank 1: MAX 1.0, MIN 1.0, SUM nan
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
cat >"$folder/ranks.py" <<'PY'
import math
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing


def reduced(owner: int, operation: dist.ReduceOp) -> float:
    value = torch.tensor([math.nan if dist.get_rank() == owner else 1.0])
    dist.all_reduce(value, op=operation)
    return value.item()


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    operations = (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM)
    found = [[reduced(owner, each) for each in operations] for owner in (0, 1)]
    print(f"result on rank {rank}, NaN on rank 0: {found[0]}, NaN on rank 1: {found[1]}", flush=True)
    first = all(map(math.isnan, found[0]))
    second = found[1][:2] == [1.0, 1.0] and math.isnan(found[1][2])
    dist.destroy_process_group()
    sys.exit(not (first and second))


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(tempfile.mktemp(),), nprocs=2)
PY
timeout 120 "$folder/venv/bin/python" "$folder/ranks.py"
