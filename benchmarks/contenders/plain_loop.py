"""A bare compiled PyTorch loop on one device: the model, `torch.compile`, fused AdamW, no ZeRO.

    python benchmarks/contenders/plain_loop.py --shard shards/web/shard-00000.bin ...

A good hand-written script: float32 weights, matmuls in bf16 by autocast, the complete model
compiled. Autocast leaves out the grouped matmuls of experts, for which transformers takes a loop in
a compiled graph if their weights are float32, so their weights are cast here. Imports nothing of
zerolm. Prints `step=N loss=L peak_bytes=B`.
"""

import argparse
import resource

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

parser = argparse.ArgumentParser()
parser.add_argument("--model_config", required=True)
parser.add_argument("--shard", required=True, help="a file of uint16 token ids")
parser.add_argument("--seq_len", type=int, required=True)
parser.add_argument("--micro_batch_size", type=int, required=True)
parser.add_argument("--accumulation", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--log_interval", type=int, required=True)
parser.add_argument("--eager", action="store_true", help="without torch.compile")
arguments = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
torch.manual_seed(0)
config = AutoConfig.from_pretrained(arguments.model_config, trust_remote_code=False)
with device:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.train()
grouped_mm = moe._grouped_mm
moe._grouped_mm = lambda rows, weights, offs: grouped_mm(rows, weights.bfloat16(), offs)
forward = model if arguments.eager else torch.compile(model)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
)
ids = np.memmap(arguments.shard, "<u2", mode="r")
random, seq_len = np.random.default_rng(0), arguments.seq_len
for step in range(1, arguments.steps + 1):
    for _ in range(arguments.accumulation):
        starts = random.integers(0, len(ids) - seq_len, arguments.micro_batch_size)
        window = np.stack([ids[start : start + seq_len] for start in starts]).astype(np.int64)
        tokens_BT = torch.from_numpy(window).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = forward(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        (loss / arguments.accumulation).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % arguments.log_interval == 0:
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        peak = peak or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"step={step} loss={loss.item():.4f} peak_bytes={peak}", flush=True)
