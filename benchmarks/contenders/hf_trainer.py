"""Hugging Face Trainer with the same DeepSpeed JSON, model and data as pretrain.py.

    deepspeed benchmarks/contenders/hf_trainer.py --shard shards/web/shard-00000.bin ...

The usual alternative to pretrain.py. Imports nothing of zerolm. Prints `step=N loss=L peak_bytes=B`
every `--log_interval` steps. Needs accelerate, in zerolm[dev].
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", required=True, help="its precision is not 'auto'")
parser.add_argument("--model_config", required=True)
parser.add_argument("--shard", required=True, help="a file of uint16 token ids")
parser.add_argument("--seq_len", type=int, required=True)
parser.add_argument("--micro_batch_size", type=int, required=True)
parser.add_argument("--accumulation", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--log_interval", type=int, required=True)
parser.add_argument("--learning_rate", type=float, default=3e-4)
parser.add_argument("--compile", action="store_true", help="with torch_compile of the Trainer")
parser.add_argument("--local_rank", type=int, default=0)
arguments = parser.parse_args()


class Windows(Dataset):
    """Consecutive windows of the shard; the Trainer's sampler shuffles them."""

    def __init__(self, path: str, seq_len: int):
        self.ids, self.seq_len = np.memmap(path, "<u2", mode="r"), seq_len

    def __len__(self) -> int:
        return len(self.ids) // self.seq_len

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window = self.ids[number * self.seq_len : (number + 1) * self.seq_len]
        tokens_T = torch.from_numpy(window.astype(np.int64))
        return {"input_ids": tokens_T, "labels": tokens_T}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):
        if state.is_world_process_zero and "loss" in (logs or {}):
            on_gpu = torch.cuda.is_available()
            peak = torch.cuda.max_memory_allocated() if on_gpu else None
            peak = peak or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            loss = float(logs["loss"])
            print(f"step={state.global_step} loss={loss:.4f} peak_bytes={peak}", flush=True)


profile = json.loads(Path(arguments.deepspeed_config).read_text())
with tempfile.TemporaryDirectory() as output_dir:
    training = TrainingArguments(
        output_dir=output_dir,
        deepspeed=arguments.deepspeed_config,
        bf16=profile.get("bf16", {}).get("enabled") is True,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=arguments.micro_batch_size,
        gradient_accumulation_steps=arguments.accumulation,
        max_steps=arguments.steps,
        logging_steps=arguments.log_interval,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        torch_compile=arguments.compile,
    )
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(arguments.model_config, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    data = Windows(arguments.shard, arguments.seq_len)
    Trainer(model=model, args=training, train_dataset=data, callbacks=[PrintLoss()]).train()
