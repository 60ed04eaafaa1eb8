#!/usr/bin/env bash
# transformers 5.23.0: with longrope (Phi-3) the logits of a row depend on the positions of the other
# rows in the batch. The short or long factors are chosen once, by torch.max(position_ids): one
# position beyond original_max_position_embeddings gives all rows the long factors.
# Seen: other row ends at position 15: 0.0, at position 16: 5.1
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM, Phi3Config

torch.manual_seed(0)
rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
config = Phi3Config(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=128, max_position_embeddings=64, initializer_range=0.2,
    original_max_position_embeddings=16, rope_parameters=rope, pad_token_id=None, eos_token_id=2,
)
model = AutoModelForCausalLM.from_config(config).eval()
ids, places = torch.randint(128, (2, 8)), torch.arange(8)


def change(last):
    """Return how far the first row's logits move if a row that ends at `last` joins the batch."""
    positions = torch.stack([places, places + last - 7])
    with torch.no_grad():
        both = model(input_ids=ids, position_ids=positions).logits[0]
        alone = model(input_ids=ids[:1], position_ids=positions[:1]).logits[0]
    return float((both - alone).abs().max())


below, beyond = change(15), change(16)
print(f"other row ends at position 15: {below:.1f}, at position 16: {beyond:.1f}")
sys.exit(not (below < 1e-4 and beyond > 1e-2))
PY
