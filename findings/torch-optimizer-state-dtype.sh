#!/usr/bin/env bash
# torch 2.13.0: Optimizer.load_state_dict casts floating-point state to the dtype of its parameter.
# An optimizer that keeps a bfloat16 momentum for float32 parameters trains on with a float32
# momentum after a resume; only the key "step" is exempt, and nothing is printed.
# Seen: before torch.bfloat16, after torch.float32
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch

weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
optimizer.state[weight]["momentum_buffer"] = torch.ones(4, dtype=torch.bfloat16)
saved = optimizer.state_dict()
resumed = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
resumed.load_state_dict(saved)
before = saved["state"][0]["momentum_buffer"].dtype
after = resumed.state[weight]["momentum_buffer"].dtype
print(f"before {before}, after {after}")
sys.exit((before, after) != (torch.bfloat16, torch.float32))
PY
