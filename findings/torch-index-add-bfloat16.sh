#!/usr/bin/env bash
# torch 2.13.0, CPU: in bfloat16, index_add and the gradient of an embedding add one by one in
# bfloat16 and stay at 256, while scatter_add and sum of the same thousand ones give 1000. So the
# gradient of a frequent token, and the combined output of experts, depend on which one is called.
# Seen: a thousand ones: index_add 256.0, embedding 256.0, scatter_add 1000.0, sum 1000.0
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch

ones = torch.ones(1000, dtype=torch.bfloat16)
places = torch.zeros(1000, dtype=torch.long)
zero = torch.zeros(1, dtype=torch.bfloat16)
embedding = torch.nn.Embedding(1, 1, dtype=torch.bfloat16)
embedding(places).sum().backward()
found = {
    "index_add": zero.index_add(0, places, ones).item(),
    "embedding": embedding.weight.grad.item(),
    "scatter_add": zero.scatter_add(0, places, ones).item(),
    "sum": ones.sum().item(),
}
print("a thousand ones:", ", ".join(f"{name} {value}" for name, value in found.items()))
sys.exit(list(found.values()) != [256, 256, 1000, 1000])
PY
