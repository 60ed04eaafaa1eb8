"""The reference: a pretraining loop in plain PyTorch and transformers, on one process.

It shares no code with the launcher but the order of the data, which has references of its own. The
weights are drawn as docs/initialization.md says, the learning rate is the textbook cosine.
"""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerolm.order import Order


def initial_model(config: dict, seed: int) -> torch.nn.Module:
    settings = dict(config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings), dtype=torch.float32
    )

    def initialize(module: torch.nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            initialize(child, f"{name}.{child_name}" if name else child_name)
        for tensor in [*module.parameters(), module]:
            tensor._is_hf_initialized = False
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:4], "little"))
        with torch.no_grad():
            model._init_weights(module)

    initialize(model, "")
    return model


def read_tokens(shards: Path) -> np.ndarray:
    manifest = json.loads((shards / "manifest.json").read_text())
    return np.concatenate(
        [np.fromfile(shards / shard["file"], manifest["dtype"]) for shard in manifest["shards"]]
    ).astype(np.int64)


def train(
    config: dict,
    shards: Path,
    *,
    seed: int,
    seq_len: int,
    batch_sequences: int,
    micro_batch_size: int,
    steps: int,
    peak: float,
    minimum: float,
    warmup_tokens: int,
    clipping: float,
    weight_decay: float = 0.1,
    bf16: bool = False,
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step. `bf16`: bf16 weights beside float32 masters."""
    model = initial_model(config, seed)
    if bf16:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    matrices = [master for master in masters if master.ndim >= 2]
    others = [master for master in masters if master.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    tokens = read_tokens(shards)
    order = Order([(len(tokens) - 1) // seq_len], [1.0], seed)
    total_tokens = steps * batch_sequences * seq_len
    curve = []
    for step in range(steps):
        windows = order(np.arange(step * batch_sequences, (step + 1) * batch_sequences)).window
        gradients = [torch.zeros_like(master) for master in masters]
        losses = []
        for chunk in np.split(windows, batch_sequences // micro_batch_size):
            text = np.stack([tokens[w * seq_len : w * seq_len + seq_len + 1] for w in chunk])
            batch = torch.from_numpy(text)
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), batch[:, 1:].flatten()
            )
            (loss * (micro_batch_size / batch_sequences)).backward()
            losses.append(loss.item())
            for gradient, parameter in zip(gradients, model.parameters(), strict=True):
                gradient += parameter.grad.float()
                parameter.grad = None
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(masters, clipping).item()
        done = (step + 1) * batch_sequences * seq_len
        if done < warmup_tokens:
            rate = peak * done / warmup_tokens
        else:
            progress = (done - warmup_tokens) / (total_tokens - warmup_tokens)
            rate = minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.data.copy_(master)
        curve.append((sum(losses) / len(losses), norm))
    return curve
