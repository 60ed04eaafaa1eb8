#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0: initialize with any optimizer and ZeRO imports torch._inductor, with
# networkx, although nothing is compiled: it asks whether the optimizer is its Muon, whose module
# calls torch.compile in decorators. That is over 1,000 modules, about a second of each rank's start.
# Seen: before False False after True True modules added: over 1000
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6 setuptools==80.9.0 wheel==0.45.1
"$folder/venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cat >"$folder/start.py" <<'PY'
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch

deepspeed.init_distributed("gloo")
names = ("torch._inductor.codecache", "networkx")
before = [name in sys.modules for name in names]
model = torch.nn.Linear(4, 4)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
known = set(sys.modules)
deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
after = [name in sys.modules for name in names]
added = len(set(sys.modules) - known)
many = "over 1000" if added > 1000 else f"{added}"
print("before", *before, "after", *after, "modules added:", many, flush=True)
muon = "deepspeed.runtime.zero.muon.original_muon"
os._exit(before != [False, False] or after != [True, True] or muon not in sys.modules)
PY
"$folder/venv/bin/torchrun" --nproc_per_node 1 --master_port $((20000 + RANDOM % 20000)) \
    "$folder/start.py" 2>/dev/null | grep -E "^before "
