#!/usr/bin/env bash
# deepspeed 0.19.8: with zero_optimization.round_robin_gradients true on two ranks, stages 1 and 2,
# deepspeed.utils.safe_get_full_fp32_param returns other values than the parameter's: it looks where
# the parameter would be without the key. safe_set_full_fp32_param writes there. Training is right.
# Seen: False [0.0, 0.0, 0.0] True [0.0, 5.0, 5.0] (largest difference of each of three parameters)
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6 setuptools==80.9.0 wheel==0.45.1
"$folder/venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cat >"$folder/read.py" <<'PY'
import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

deepspeed.init_distributed("gloo")
found = {}
for key in (False, True):
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)]
    for number, layer in enumerate(layers, 1):
        torch.nn.init.constant_(layer.weight, number**2)
    model = torch.nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": 1, "round_robin_gradients": key},
    }
    deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    pairs = [(each, safe_get_full_fp32_param(each)) for each in model.parameters()]
    found[key] = [float((one - other).abs().max()) for one, other in pairs]
if os.environ["RANK"] == "0":
    print(*(part for pair in found.items() for part in pair), flush=True)
os._exit(found[False] != [0.0] * 3 or found[True] == [0.0] * 3)
PY
"$folder/venv/bin/torchrun" --nproc_per_node 2 --master_port $((20000 + RANDOM % 20000)) \
    "$folder/read.py" 2>/dev/null | grep -E "^False "
