#!/usr/bin/env bash
# transformers 5.24.0: position_ids that restart at 0 keep packed documents apart only if the call
# has use_cache=False and no attention_mask. With the default use_cache=True of a config, or with a
# mask of ones, as tokenizers return it, the second document attends to the first.
# Seen: largest difference from the second document alone: use_cache=False below 1e-5, default above
# 0.01, mask of ones above 0.01
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6 transformers==5.24.0
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    initializer_range=0.2,
)
model = LlamaForCausalLM(config).float().eval()
ids = torch.randint(3, 64, (1, 8))
positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
with torch.no_grad():
    alone = model(ids[:, 4:]).logits
    ways = {
        "use_cache=False": dict(use_cache=False),
        "default": {},
        "mask of ones": dict(use_cache=False, attention_mask=torch.ones(1, 8, dtype=torch.long)),
    }
    gaps = {
        name: (model(ids, position_ids=positions, **each).logits[:, 4:] - alone).abs().max().item()
        for name, each in ways.items()
    }
print("largest difference from the second document alone:", gaps)
kept, default, ones = gaps.values()
sys.exit(not (kept < 1e-5 and default > 0.01 and ones > 0.01))
PY
