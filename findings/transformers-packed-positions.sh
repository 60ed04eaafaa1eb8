#!/usr/bin/env bash
# transformers 5.23.0: Llama keeps packed sequences apart by position_ids that restart, but OPT, which
# takes the same argument, does not: its mask is made without them, and nothing is printed.
# Seen: logits of the second sequence move with the first: llama 0.0, opt 4.6
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
configs = {
    "llama": LlamaConfig(intermediate_size=128, initializer_range=0.2, **sizes),
    "opt": OPTConfig(ffn_dim=128, word_embed_proj_dim=64, init_std=0.2, dropout=0.0, **sizes),
}
moved = {}
for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, positions = torch.randint(5, 128, (1, 16)), torch.arange(8).repeat(2)[None]
    other = ids.clone()
    other[0, :8] = torch.randint(5, 128, (8,))
    with torch.no_grad():
        first, second = (
            model(input_ids=each, position_ids=positions, use_cache=False).logits[0, 8:]
            for each in (ids, other)
        )
    moved[name] = float((first - second).abs().max())
shown = ", ".join(f"{name} {value:.1f}" for name, value in moved.items())
print(f"logits of the second sequence move with the first: {shown}")
sys.exit(not (moved["llama"] < 1e-4 and moved["opt"] > 1e-2))
PY
