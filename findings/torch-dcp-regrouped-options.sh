#!/usr/bin/env bash
# torch 2.13.0: set_optimizer_state_dict (torch.distributed.checkpoint.state_dict) takes parameters by
# name but options by group: a checkpoint of two groups loads into one without a message, and all its
# parameters get the options of the last saved group, so those without weight decay now have it. One
# group loads into two, but the first of them has no learning rate and no betas then.
# Seen: saved 0.weight: lr 0.1, weight decay 0.0; 1.weight: 0.2, 0.5; one group: all 0.2, 0.5; one
# group into two: lr [None, 0.3]; step: KeyError 'betas'
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
first, second = model.parameters()


def one_group():
    return torch.optim.AdamW([first, second], lr=0.3)


def two_groups():
    groups = [{"params": [first], "lr": 0.1, "weight_decay": 0.0}]
    return torch.optim.AdamW([*groups, {"params": [second], "lr": 0.2, "weight_decay": 0.5}])


merged = one_group()
set_optimizer_state_dict(model, merged, get_optimizer_state_dict(model, two_groups()))
(group,) = merged.param_groups
split = two_groups()
set_optimizer_state_dict(model, split, get_optimizer_state_dict(model, one_group()))
rates = [each.get("lr") for each in split.param_groups]
first.grad = torch.ones(2, 2)
try:
    split.step()
    outcome = "done"
except KeyError as error:
    outcome = f"KeyError {error}"
print(f"two groups into one: lr {group['lr']}, weight decay {group['weight_decay']} for both;", end=" ")
print(f"one into two: lr {rates}, step: {outcome}")
sys.exit((group["lr"], group["weight_decay"], *rates) != (0.2, 0.5, None, 0.3) or outcome == "done")
PY
