#!/usr/bin/env bash
# transformers 5.23.0: attention sinks (`s_aux`) are left out without a message if the FlashAttention
# function has no parameter for them, as in flash-attn 2 and 3. A soft cap raises ValueError instead.
# Seen: softcap: ValueError; s_aux: left out
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch
from transformers import modeling_flash_attention_utils as utils


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
    causal=False, window_size=(-1, -1),
):  # fmt: skip
    """Have the parameters of a version that knows neither soft caps nor sinks."""


arguments = utils._lazy_define_process_function(flash_attn_varlen_func)
try:
    arguments(query_length=8, key_length=8, is_causal=True, softcap=30.0)
    softcap = "left out"
except ValueError:
    softcap = "ValueError"
given = arguments(query_length=8, key_length=8, is_causal=True, s_aux=torch.ones(4))
sinks = "passed" if {"s_aux", "learnable_sink"} & given.keys() else "left out"
print(f"softcap: {softcap}; s_aux: {sinks}")
sys.exit((softcap, sinks) != ("ValueError", "left out"))
PY
