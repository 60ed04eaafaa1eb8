#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0: what zero_to_fp32 makes of a checkpoint of ZeRO stage 1 lacks the
# frozen parameters, without a message; of stages 2 and 3 it has them. They are in the checkpoint's
# file of weights, but the list that the conversion reads is empty at stage 1.
# Seen: stage 1: out.weight; stage 2: base.weight, out.weight; stage 3: base.weight, out.weight
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6 setuptools==80.9.0 wheel==0.45.1
"$folder/venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cat >"$folder/convert.py" <<'PY'
import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.init_distributed("gloo")
found = {}
for stage in (1, 2, 3):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("base", "out")})
    model["base"].weight.requires_grad = False
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    trained = [each for each in model.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    engine.save_checkpoint(f"{sys.argv[1]}/stage{stage}", tag="step")
    found[stage] = sorted(get_fp32_state_dict_from_zero_checkpoint(f"{sys.argv[1]}/stage{stage}"))
print("; ".join(f"stage {stage}: {', '.join(names)}" for stage, names in found.items()), flush=True)
both = ["base.weight", "out.weight"]
os._exit(found != {1: ["out.weight"], 2: both, 3: both})
PY
"$folder/venv/bin/python" "$folder/convert.py" "$folder" $((20000 + RANDOM % 20000)) 2>/dev/null |
    grep -E "^stage 1"
exit "${PIPESTATUS[0]}"
