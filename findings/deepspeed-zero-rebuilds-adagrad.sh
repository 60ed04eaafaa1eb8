#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0: at ZeRO stages 1 to 3 torch's Adagrad is made anew with the
# defaults of its constructor, so the options of parameter groups are lost, and all groups but the
# first. With one group that has a learning rate of its own, training takes the default one without
# a message; with two groups the first step ends in an IndexError.
# Seen: stage 1: asked 0.5, got 0.01; two groups: IndexError (stages 2 and 3: the same)
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6 setuptools==80.9.0 wheel==0.45.1
"$folder/venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cat >"$folder/step.py" <<'PY'
import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed
import torch

deepspeed.init_distributed("gloo")
ASKED, DEFAULT = 0.5, 0.01


def step(stage, num_groups):
    """Return the change of a weight in the first step, which Adagrad makes the learning rate."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2)))
    halves = [[each] for each in model.parameters()]
    groups = halves if num_groups == 2 else [sum(halves, [])]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.Adagrad([{"params": each, "lr": ASKED} for each in groups], lr=DEFAULT)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    before = weight(model)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return round(float((weight(model) - before).abs().max()), 4)


def weight(model):
    parameter = next(model.parameters())
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


changed = False
for stage in (1, 2, 3):
    rate = step(stage, 1)
    try:
        outcome = str(step(stage, 2))
    except IndexError as error:
        outcome = type(error).__name__
    print(f"stage {stage}: asked {ASKED}, got {rate}; two groups: {outcome}", flush=True)
    changed |= rate == ASKED or outcome != "IndexError"
os._exit(changed)
PY
"$folder/venv/bin/python" "$folder/step.py" $((20000 + RANDOM % 20000)) 2>/dev/null |
    grep -E "^stage "
exit "${PIPESTATUS[0]}"
