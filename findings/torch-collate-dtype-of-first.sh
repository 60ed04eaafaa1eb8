#!/usr/bin/env bash
# torch 2.13.0: the DataLoader's default collation gives a batch of Python numbers float64 if the
# first is a float, and float32 if the first is an integer and a later one a float, so in a column of
# JSON numbers (0, 0.25, 1) the dtype changes from batch to batch, and an integer above 2**24 beside
# a float is rounded in one order and not in the other.
# Seen: [16777217, 0.5]: torch.float32, first number 16777216; [0.5, 16777217]: torch.float64, second
# number 16777217
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

from torch.utils.data import DataLoader

BIG = 2**24 + 1
one, other = DataLoader([BIG, 0.5, 0.5, BIG], batch_size=2)
print(f"[{BIG}, 0.5]: {one.dtype}, {int(one[0])}; [0.5, {BIG}]: {other.dtype}, {int(other[1])}")
sys.exit((str(one.dtype), int(one[0])) != ("torch.float32", BIG - 1) or int(other[1]) != BIG)
PY
