#!/usr/bin/env bash
# safetensors 0.8.0, torch 2.13.0: of a tensor that torch conjugates or negates lazily (conj(), and
# the imaginary part of that), save_file writes the memory, so the conjugate of rotary factors comes
# back without being conjugated, and a real tensor with the other sign. torch.save and
# torch.distributed.checkpoint keep both.
# Seen: conjugate saved (1-2j), loaded (1+2j); imaginary part of it, float32: saved -2.0, loaded 2.0;
# torch.save: (1-2j) and -2.0
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6 safetensors==0.8.0
"$folder/venv/bin/python" - "$folder/weights.safetensors" <<'PY'
import io
import sys

import torch
from safetensors.torch import load_file, save_file

factors = torch.tensor([1 + 2j]).conj()
tensors = {"conjugate": factors, "imaginary": torch.tensor([1 + 2j]).conj().imag}
save_file(tensors, sys.argv[1])
loaded = load_file(sys.argv[1])
pickled = io.BytesIO()
torch.save(tensors, pickled)
pickled.seek(0)
kept = torch.load(pickled)
for name, tensor in tensors.items():
    print(f"{name} ({tensor.dtype}): saved {tensor.item()}, loaded {loaded[name].item()},", end=" ")
    print(f"with torch.save {kept[name].item()}")
same = [torch.equal(tensor, loaded[name]) for name, tensor in tensors.items()]
sys.exit(any(same) or not all(torch.equal(tensors[name], kept[name]) for name in tensors))
PY
