"""litgpt's own pretraining with the model, batch and token shard of benchmarks/training_speed.py.

    python benchmarks/contenders/litgpt_pretrain.py --shard shards/web/shard-00000.bin ...

Needs the Python of an environment with litgpt (benchmarks/peers.sh creates one); imports nothing of
zerolm. Calls `litgpt.pretrain.setup`, as `litgpt pretrain` does, with its own Fabric,
torch.compile, precision (bf16-mixed: float32 weights, matmuls in bf16) and logger. One process with
all cores: for several devices litgpt uses FSDP, which Fabric refuses on CPUs. Prints litgpt's own
lines, `Epoch 1 | iter 8 step 4 | loss train: 8.314, ...`, every `--log_interval` steps.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litgpt import Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.model import GPT
from litgpt.pretrain import setup
from litgpt_shape import litgpt_shape
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--model_config", required=True)
parser.add_argument("--shard", required=True, help="a file of uint16 token ids")
parser.add_argument("--seq_len", type=int, required=True)
parser.add_argument("--micro_batch_size", type=int, required=True)
parser.add_argument("--batch_size", type=int, required=True, help="sequences per step")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--log_interval", type=int, required=True)
parser.add_argument("--out_dir", type=Path, required=True)
parser.add_argument(
    "--parameters", type=int, required=True, help="number of parameters that the model must have"
)
arguments = parser.parse_args()


class Windows(Dataset):
    """Consecutive windows of the shard, each with the target of its last token."""

    def __init__(self, path: str, seq_len: int):
        self.ids, self.seq_len = np.memmap(path, "<u2", mode="r"), seq_len

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.seq_len

    def __getitem__(self, number: int) -> torch.Tensor:
        first = number * self.seq_len
        return torch.from_numpy(self.ids[first : first + self.seq_len + 1].astype(np.int64))


class Shard(DataModule):
    """The windows, shuffled; also for validation: litgpt runs two batches of it at the start."""

    def connect(
        self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: Any = None
    ) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        windows = Windows(arguments.shard, arguments.seq_len)
        return DataLoader(windows, self.batch_size, shuffle=True, drop_last=True)

    val_dataloader = train_dataloader


hf_config = json.loads(Path(arguments.model_config).read_text())
config = Config(**litgpt_shape(hf_config, arguments.seq_len))
tied = bool(hf_config.get("tie_word_embeddings"))
with torch.device("meta"):
    model = GPT(config)
parameters = sum(parameter.numel() for parameter in model.parameters())
parameters -= model.lm_head.weight.numel() if tied else 0
print(f"parameters: {parameters:,}, of the Hugging Face model {arguments.parameters:,}", flush=True)
if parameters != arguments.parameters:
    sys.exit("the models differ")
setup(
    model_name=config.name,
    model_config=config,
    out_dir=arguments.out_dir,
    precision="bf16-mixed",
    data=Shard(),
    train=TrainArgs(
        save_interval=None,
        log_interval=arguments.log_interval,
        global_batch_size=arguments.batch_size,
        micro_batch_size=arguments.micro_batch_size,
        max_tokens=arguments.steps * arguments.batch_size * arguments.seq_len,
        max_norm=1.0,
        min_lr=3e-5,
        lr_warmup_steps=100,
        tie_embeddings=tied,
    ),
    eval=EvalArgs(interval=arguments.steps + 1, max_iters=1, final_validation=False),
    optimizer={
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    },
    devices=1,
    logger_name="csv",
)
