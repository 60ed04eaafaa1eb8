#!/usr/bin/env bash
# torch 2.13.0: an optimizer built from named_parameters() saves the names, but load_state_dict still
# matches by position: parameters given in another order get each other's moments, of other shapes,
# without an error or a warning, although both sides have the names.
# Seen: names saved ['weight', 'bias'], loaded ['bias', 'weight']; bias of shape (2,) has moments
# (2, 2)
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys

import torch

layer = torch.nn.Linear(2, 2)
named = dict(layer.named_parameters())
first = torch.optim.AdamW([(name, named[name]) for name in ("weight", "bias")])
layer(torch.ones(1, 2)).sum().backward()
first.step()
second = torch.optim.AdamW([(name, named[name]) for name in ("bias", "weight")])
saved = first.state_dict()
built = list(second.param_groups[0]["param_names"])
second.load_state_dict(saved)
shape = tuple(second.state[layer.bias]["exp_avg"].shape)
print(f"names saved {saved['param_groups'][0]['param_names']}, loaded {built};", end=" ")
print(f"bias of shape {tuple(layer.bias.shape)} has moments {shape}")
sys.exit(shape != (2, 2) or built != ["bias", "weight"])
PY
