"""A minimal DeepSpeed training loop, the reference for pretrain.py.

    deepspeed benchmarks/contenders/bare_deepspeed.py --shard shards/web/shard-00000.bin ...

Imports nothing of zerolm. Prints `step=N loss=L` every `--log_interval` steps, as pretrain.py does.
No checks, no checkpoints, no metrics.
"""

import argparse
import json
from pathlib import Path

import deepspeed
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", required=True, help="DeepSpeed config without 'auto'")
parser.add_argument("--model_config", required=True)
parser.add_argument("--shard", required=True, help="a file of uint16 token ids")
parser.add_argument("--seq_len", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--log_interval", type=int, required=True)
parser.add_argument("--local_rank", type=int, default=0)
arguments = parser.parse_args()

deepspeed.init_distributed()
ds_config = json.loads(Path(arguments.deepspeed_config).read_text())
config = AutoConfig.from_pretrained(arguments.model_config, trust_remote_code=False)
torch.manual_seed(0)
dtype = torch.bfloat16 if ds_config.get("bf16", {}).get("enabled") else torch.float32
with deepspeed.zero.Init(
    config_dict_or_path=ds_config, enabled=ds_config["zero_optimization"]["stage"] == 3
):
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=ds_config
)
ids = np.memmap(arguments.shard, "<u2", mode="r")
random = np.random.default_rng(torch.distributed.get_rank())
micro_batch, seq_len = engine.train_micro_batch_size_per_gpu(), arguments.seq_len
for step in range(1, arguments.steps + 1):
    for _ in range(engine.gradient_accumulation_steps()):
        starts = random.integers(0, len(ids) - seq_len, micro_batch)
        window = np.stack([ids[start : start + seq_len] for start in starts]).astype(np.int64)
        tokens_BT = torch.from_numpy(window).to(engine.device)
        loss = engine(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    if step % arguments.log_interval == 0 and torch.distributed.get_rank() == 0:
        print(f"step={step} loss={loss.item():.4f}", flush=True)
torch.distributed.barrier()
engine.destroy()
torch.distributed.destroy_process_group()
