#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict (torch.distributed.checkpoint.state_dict), called before the
# first step, takes a step itself and leaves its count of 1 in the optimizer, so a run that saves at
# step 0 trains otherwise than one that does not. AdamW's first update is then 0.744 of what it
# should be (its moments are 0, but the correction of their bias is that of step 2), RAdam's 0.526,
# and that of SGD with momentum and dampening 0.9 a tenth.
# Seen: AdamW -0.1000 without a save, -0.0744 with (step saved: 1.0); RAdam -0.1000, -0.0526; SGD
# with dampening -0.1000, -0.0100
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(kind, saves, **options):
    """Return the first change of a weight whose gradient is 1, and the saved number of steps."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = kind(layer.parameters(), lr=0.1, weight_decay=0, **options)
    step = None
    if saves:
        step = get_optimizer_state_dict(layer, optimizer)["state"]["weight"].get("step")
        step = None if step is None else step.item()
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return layer.weight.item(), step


changed = False
damped = {"momentum": 0.9, "dampening": 0.9}
for kind, options in ((torch.optim.AdamW, {}), (torch.optim.RAdam, {}), (torch.optim.SGD, damped)):
    without, _ = first_update(kind, False, **options)
    with_save, step = first_update(kind, True, **options)
    print(f"{kind.__name__}: {without:.4f} without a save, {with_save:.4f} with one, step {step}")
    changed |= abs(with_save / without) > 0.8
sys.exit(changed)
PY
