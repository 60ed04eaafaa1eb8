#!/usr/bin/env bash
# safetensors 0.8.0: safetensors.numpy.save and save_file write the bytes of an array in the order of
# its memory, with the shape that it has, so a transposed array (as in a conversion between Linear and
# Conv1D) comes back with its values in other places, without an error. safetensors.torch refuses
# such a tensor.
# Seen: saved [[0, 3], [1, 4], [2, 5]], loaded [[0, 1], [2, 3], [4, 5]]; Fortran order:
# [[0, 1, 2], [3, 4, 5]], loaded [[0, 3, 1], [4, 2, 5]]
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q safetensors==0.8.0 numpy==2.2.6
"$folder/venv/bin/python" - "$folder/weights.safetensors" <<'PY'
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

weight = np.arange(6, dtype=np.float32).reshape(2, 3)
tensors = {"transposed": weight.T, "fortran": np.asfortranarray(weight)}
save_file(tensors, sys.argv[1])
loaded = load_file(sys.argv[1])
for name, tensor in tensors.items():
    print(f"{name}: saved {tensor.astype(int).tolist()}, loaded {loaded[name].astype(int).tolist()}")
sys.exit(any(np.array_equal(tensor, loaded[name]) for name, tensor in tensors.items()))
PY
