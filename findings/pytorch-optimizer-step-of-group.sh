#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: AdaBelief counts the steps of a group in which no parameter has a gradient.
# The count is in the parameter group and grows with every call of step(), so a group that is
# unfrozen after 9 steps starts with the bias correction of step 10: its first update is about half
# of the learning rate. torch counts in the state of each parameter. Adan and DiffGrad of the same
# library count like AdaBelief; its Adam does not.
# Seen: first update / learning rate: torch 1.00, pytorch-optimizer 0.54
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/pip" install -q --no-deps pytorch-optimizer==4.1.0
"$folder/venv/bin/python" - <<'PY'
import sys

import pytorch_optimizer
import torch

RATE = 0.01


def first_update(kind):
    """Return the first update of a weight that is unfrozen after 9 steps, divided by the rate."""
    body, head = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = kind([{"params": [body]}, {"params": [head]}], lr=RATE)
    for step in range(10):
        body.grad = torch.ones(3)
        head.grad = torch.ones(3) if step == 9 else None
        optimizer.step()
    return float((1 - head.detach()).max()) / RATE


torchs = first_update(torch.optim.Adam)
others = first_update(pytorch_optimizer.AdaBelief)
print(f"first update / learning rate: torch {torchs:.2f}, pytorch-optimizer {others:.2f}")
sys.exit(not (abs(torchs - 1) < 0.01 and abs(others - 1) > 0.1))
PY
