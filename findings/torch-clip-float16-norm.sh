#!/usr/bin/env bash
# torch 2.13.0: clip_grad_norm_ takes the norm of float16 gradients in float16, so finite gradients
# whose norm is above 65504 have the norm inf, and clipping sets every gradient to 0, also those in
# float32: the step does nothing, and nothing is NaN. (A gradient that is inf becomes NaN.)
# Seen: gradients of 40000 (float16, four) and 1 (float32): norm inf, afterwards 0.0 and 0.0; the same
# in float32: norm 80000.0, afterwards 0.5 and 1.25e-05
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch


def clipped(dtype):
    """Return the norm of four large gradients and a small one, and what clipping makes of them."""
    large = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    small = torch.nn.Parameter(torch.zeros(1))
    large.grad = torch.full((4,), 40000.0, dtype=dtype)
    small.grad = torch.ones(1)
    norm = torch.nn.utils.clip_grad_norm_([large, small], 1.0)
    return norm.item(), large.grad[0].item(), small.grad.item()


half, single = clipped(torch.float16), clipped(torch.float32)
for name, (norm, large, small) in (("float16", half), ("float32", single)):
    print(f"{name}: norm {norm}, then {large:.3g} and {small:.3g}")
sys.exit(half != (float("inf"), 0.0, 0.0) or not 0.4 < single[1] < 0.6)
PY
