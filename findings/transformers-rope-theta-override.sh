#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0: rope_theta, an argument of LlamaConfig, is kept in
# rope_parameters only, so AutoConfig.from_pretrained(path, rope_theta=...) and an assignment to
# config.rope_theta change nothing, without a message: a model whose context should be extended
# keeps its frequencies. After an assignment config.json has both numbers, and the old one counts.
# Seen: smallest frequency of theta 10000: 1.0e-03; 5e6 in the constructor: 9.5e-06, in
# from_pretrained: 1.0e-03, assigned: 1.0e-03, then saved (rope_theta 5e6, in rope_parameters 1e4)
# and loaded: 1.0e-03
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - "$folder/one" "$folder/two" <<'PY'
import json
import sys

from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

one, two = sys.argv[1:]
THETA = 5e6
SIZES = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def smallest(config):
    """Return the smallest frequency that a model of this configuration rotates with."""
    return f"{LlamaForCausalLM(config).model.rotary_emb.inv_freq.min().item():.1e}"


LlamaConfig(**SIZES).save_pretrained(one)
assigned = LlamaConfig(**SIZES)
assigned.rope_theta = THETA
assigned.save_pretrained(two)
found = {
    "theta 1e4": smallest(LlamaConfig(**SIZES)),
    "5e6 in the constructor": smallest(LlamaConfig(**SIZES, rope_theta=THETA)),
    "in from_pretrained": smallest(AutoConfig.from_pretrained(one, rope_theta=THETA)),
    "assigned": smallest(assigned),
    "saved and loaded": smallest(AutoConfig.from_pretrained(two)),
}
print("smallest frequency:", ", ".join(f"{name} {value}" for name, value in found.items()))
with open(f"{two}/config.json") as file:
    saved = json.load(file)
print(f"config.json: rope_theta {saved['rope_theta']}, rope_parameters {saved['rope_parameters']}")
plain, constructed, *others = found.values()
sys.exit(plain == constructed or set(others) != {plain} or saved["rope_theta"] != THETA)
PY
