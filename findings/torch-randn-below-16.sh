#!/usr/bin/env bash
# torch 2.13.0, CPU: with the same seed, randn(15) is not the beginning of randn(16), and randn(16)
# not that of randn(20). Below 16 values another algorithm draws them, and the last 16 of a size that
# is no multiple of 16 are drawn twice. A shard of a weight can be drawn by itself only in sixteens.
# Seen: 15 of 16 equal: False; 16 of 20 equal: False; 16 of 32 equal: True; 8 + 8 equal 16: False;
# 16 + 16 equal 32: True
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys

import torch


def drawn(*sizes: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.cat([torch.randn(size) for size in sizes])


equal = {
    "15 of 16 equal": torch.equal(drawn(15), drawn(16)[:15]),
    "16 of 20 equal": torch.equal(drawn(16), drawn(20)[:16]),
    "16 of 32 equal": torch.equal(drawn(16), drawn(32)[:16]),
    "8 + 8 equal 16": torch.equal(drawn(8, 8), drawn(16)),
    "16 + 16 equal 32": torch.equal(drawn(16, 16), drawn(32)),
}
print("; ".join(f"{name}: {same}" for name, same in equal.items()))
sys.exit(list(equal.values()) != [False, False, True, False, True])
PY
