"""The reference: a pretraining loop in plain PyTorch and transformers, in one process.

It shares only the order of the data with zerolm, which is tested against references of its own.
Weights are initialized as docs/initialization.md specifies; the learning rate is the cosine.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end import plain_optimizers
from tests.end_to_end.plain_experts import (
    BiasBalance,
    Penalties,
    router_entropies,
    tokens_by_expert,
)
from tests.end_to_end.recipe import (
    BATCH,
    CLIPPING,
    MINIMUM,
    PEAK,
    SEED,
    SEQ_LEN,
    STEPS,
    WARMUP_TOKENS,
)
from zerolm.data.order import Order


@dataclass
class Step:
    """The figures of one step of the reference.

    Attributes:
        loss: mean over the batch.
        grad_norm: 2-norm before clipping.
        chunk_gradients: {sequences in a chunk: squared norm of the gradient of each chunk's mean
            loss}.
        param_norms, update_ratios: {block: value after the step}; "" is the whole model.
        auxiliary: weighted router loss, averaged over the chunks of sequences.
        routed: (chunks, layers, experts) number of tokens routed to each expert.
        entropies: (layers,) mean entropy of the router's distribution for a token.
        biases: {name: value after the step} of routers with a bias.
        penalties: {metric: value} of `Penalties`.
        attention: largest attention logit, and number of clipped heads.
    """

    loss: float
    grad_norm: float
    chunk_gradients: dict[int, list[float]]
    param_norms: dict[str, float]
    update_ratios: dict[str, float]
    auxiliary: float = 0.0
    routed: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0)))
    entropies: np.ndarray = field(default_factory=lambda: np.zeros(0))
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    penalties: dict[str, float] = field(default_factory=dict)
    attention: tuple[float, int] = (0.0, 0)


# Of a Llama with two layers: {block: substring of the names of its parameters}.
BLOCKS = {
    "embed_tokens": "embed_tokens", "layers.0": ".0.", "layers.1": ".1.", "norm": "model.norm",
    "lm_head": "lm_head",
}  # fmt: skip


def norms_by_block(names: list[str], tensors: list[torch.Tensor]) -> dict[str, float]:
    squares = [tensor.double().square().sum().item() for tensor in tensors]
    norms = {"": math.sqrt(sum(squares))}
    for block, part in BLOCKS.items():
        of_block = [square for name, square in zip(names, squares, strict=True) if part in name]
        if of_block:
            norms[block] = math.sqrt(sum(of_block))
    return norms


def chunk_gradients(gradients: list[list[torch.Tensor]], sequences: int) -> dict[int, list[float]]:
    """Return {sequences in a chunk: squared gradient norms}: of chunks, of pairs of chunks, ..."""
    found = {}
    while len(gradients) > 1:
        found[sequences] = [
            sum(tensor.double().square().sum().item() for tensor in gradient)
            for gradient in gradients
        ]
        pairs = zip(gradients[::2], gradients[1::2], strict=True)
        gradients = [[(x + y) / 2 for x, y in zip(a, b, strict=True)] for a, b in pairs]
        sequences *= 2
    return found


def noise_scales(curve: list[Step], sequences: int, batch: int, seq_len: int) -> list[float | None]:
    """Return the smoothed B_simple of each step, in tokens (McCandlish et al. 2018, app. A.1)."""
    small_size, big_size = sequences * seq_len, batch * seq_len
    found: list[float | None] = []
    signals: list[float] = []
    noises: list[float] = []
    for step in curve:
        small = float(np.mean(step.chunk_gradients[sequences]))
        big = step.grad_norm**2
        signals.append((big_size * big - small_size * small) / (big_size - small_size))
        noises.append((small - big) / (1 / small_size - 1 / big_size))
        weights = 0.95 ** np.arange(len(signals))[::-1]
        signal, noise = float(weights @ signals), float(weights @ noises)
        found.append(noise / signal if signal > 0 and noise > 0 else None)
    return found


def initial_model(config: dict, seed: int) -> torch.nn.Module:
    settings = dict(config)
    tied = settings.pop("tie_word_embeddings")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings, tie_word_embeddings=False),
        dtype=torch.float32,
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
    model.config.tie_word_embeddings = tied  # drawn untied, then tied: docs/initialization.md
    model.tie_weights()
    return model


def read_tokens(shards: Path) -> np.ndarray:
    manifest = json.loads((shards / "manifest.json").read_text())
    return np.concatenate(
        [np.fromfile(shards / shard["file"], manifest["dtype"]) for shard in manifest["shards"]]
    ).astype(np.int64)


def adamw(masters: dict[str, torch.Tensor], weight_decay: float) -> torch.optim.Optimizer:
    matrices = [master for master in masters.values() if master.ndim >= 2]
    others = [master for master in masters.values() if master.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )


Rate = Callable[[int, int, int, float, float], float]


def cosine(tokens: int, total: int, warmup: int, peak: float, minimum: float) -> float:
    """Return the learning rate after `tokens` tokens."""
    if tokens < warmup:
        return peak * tokens / warmup
    progress = (tokens - warmup) / (total - warmup)
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class Batch:
    """The gradient of the mean loss of a batch, accumulated over chunks of its sequences."""

    gradients: list[torch.Tensor]
    of_chunks: list[list[torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    auxiliary: list[float] = field(default_factory=list)
    routed: list[np.ndarray] = field(default_factory=list)
    entropies: list[np.ndarray] = field(default_factory=list)

    def add(
        self,
        model: torch.nn.Module,
        config: dict,
        text: np.ndarray,
        share: float,
        penalties: Penalties | None = None,
    ) -> None:
        """Run forward and backward on a chunk that is `share` of the batch."""
        batch = torch.from_numpy(text)
        outputs = model(input_ids=batch[:, :-1], use_cache=False)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits.float().flatten(0, 1), batch[:, 1:].flatten()
        )
        self.losses.append(loss.item())
        if penalties is not None:
            loss = loss + penalties(outputs)
        elif config.get("output_router_logits"):
            weighted = config["router_aux_loss_coef"] * outputs.aux_loss
            loss = loss + weighted
            self.auxiliary.append(weighted.item())
            self.routed.append(tokens_by_expert(outputs, config["num_experts_per_tok"]))
            self.entropies.append(router_entropies(outputs))
        loss.backward()
        self.of_chunks.append([parameter.grad.float() for parameter in model.parameters()])
        for gradient, parameter in zip(self.gradients, model.parameters(), strict=True):
            gradient += parameter.grad.float() * share
            parameter.grad = None

    def routing(self) -> dict[str, Any]:
        """Return the fields of a `Step` about experts."""
        return {
            "auxiliary": sum(self.auxiliary) / max(1, len(self.auxiliary)),
            "routed": np.array(self.routed),
            "entropies": np.mean(self.entropies, axis=0) if self.entropies else np.zeros(0),
        }


def model_at_start(
    config: dict,
    seed: int,
    source: Path | None,
    bf16: bool,
    change: Callable[[torch.nn.Module], None],
) -> torch.nn.Module:
    if source is None:
        model = initial_model(config, seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    change(model)
    if bf16:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model


def batches_of(
    shards: Path, seed: int, seq_len: int, batch_sequences: int, micro_batch_size: int
) -> Iterator[np.ndarray]:
    """Yield the token ids of batches without end, (chunks, micro_batch_size, seq_len + 1)."""
    tokens = read_tokens(shards)
    order = Order([(len(tokens) - 1) // seq_len], [1.0], seed)
    for start in itertools.count(0, batch_sequences):
        windows = order(np.arange(start, start + batch_sequences)).window
        text = np.stack([tokens[w * seq_len : w * seq_len + seq_len + 1] for w in windows])
        yield text.reshape(-1, micro_batch_size, seq_len + 1)


def clip(
    masters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    clipping: float,
    agc: float = 0.0,
) -> float:
    """Set the clipped gradients of the masters; return the norm before clipping."""
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    if agc:
        before = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
        for master, gradient in zip(masters, gradients, strict=True):
            limit = agc * max(master.norm().item(), 1e-3)
            gradient *= min(1.0, limit / max(gradient.norm().item(), 1e-6))
        torch.nn.utils.clip_grad_norm_(masters, clipping or math.inf)
        return before
    return torch.nn.utils.clip_grad_norm_(masters, clipping or math.inf).item()


def update(
    model: torch.nn.Module,
    masters: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rate: float,
    attention: plain_optimizers.QkClip | None,
) -> dict[str, Any]:
    """Take a step at a learning rate; return the fields of a `Step` about it."""
    before = [master.clone() for master in masters.values()]
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("ratio", 1.0)
    optimizer.step()
    clipped = attention.step(masters) if attention else (0.0, 0)
    for parameter, master in zip(model.parameters(), masters.values(), strict=True):
        parameter.data.copy_(master)
    names = [name for name, _ in model.named_parameters()]
    changes = [new - old for new, old in zip(masters.values(), before, strict=True)]
    weights = norms_by_block(names, [parameter.detach() for parameter in model.parameters()])
    updates = norms_by_block(names, changes)
    return {
        "param_norms": weights,
        "update_ratios": {
            block: updates[block] / norm if norm else math.inf for block, norm in weights.items()
        },
        "attention": clipped,
    }


def train(
    config: dict,
    shards: Path,
    *,
    seed: int = SEED,
    seq_len: int = SEQ_LEN,
    batch_sequences: int = BATCH,
    micro_batch_size: int = 2,
    steps: int = STEPS,
    peak: float = PEAK,
    minimum: float = MINIMUM,
    warmup_tokens: int = WARMUP_TOKENS,
    clipping: float = CLIPPING,
    weight_decay: float = 0.1,
    bf16: bool = False,
    optimizer_of: Callable[[dict[str, torch.Tensor], float], Any] = adamw,
    source: Path | None = None,
    balance_rate: float | None = None,
    penalties: Penalties | None = None,
    qk_clip: float = 0.0,
    agc: float = 0.0,
    change: Callable[[torch.nn.Module], None] = lambda model: None,
    rate_of: Rate = cosine,
) -> list[Step]:
    """Train by the recipe of the end-to-end tests, and return the figures of each step.

    Args:
        bf16: train bf16 weights with float32 master weights.
        optimizer_of: creates the optimizer from {name: master} and the weight decay; the `ratio` of
            a group multiplies the learning rate of the schedule.
        source: model directory to start from, as `from_pretrained` loads it.
        balance_rate: of the routers' biases; None for a model without them.
        penalties: minimized with the loss, instead of the router loss of each chunk.
        qk_clip: threshold of attention logits; 0: off.
        agc: largest gradient norm of a parameter, relative to its weight; 0: off.
        change: applied to the model before it trains.
        rate_of: the learning rate, with the arguments of `cosine`.
    """
    model = model_at_start(config, seed, source, bf16, change)
    masters = {name: each.detach().float().clone() for name, each in model.named_parameters()}
    optimizer = optimizer_of(masters, weight_decay)
    balance = BiasBalance(model, balance_rate) if balance_rate is not None else None
    attention = plain_optimizers.QkClip(model, qk_clip) if qk_clip else None
    batch_tokens = batch_sequences * seq_len
    texts = batches_of(shards, seed, seq_len, batch_sequences, micro_batch_size)
    curve = []
    for number, chunks in zip(range(1, steps + 1), texts, strict=False):
        batch = Batch([torch.zeros_like(master) for master in masters.values()])
        for text in chunks:
            batch.add(model, config, text, micro_batch_size / batch_sequences, penalties)
        norm = clip(list(masters.values()), batch.gradients, clipping, agc)
        rate = rate_of(number * batch_tokens, steps * batch_tokens, warmup_tokens, peak, minimum)
        figures = batch.routing() | update(model, masters, optimizer, rate, attention)
        if balance is not None:
            figures["biases"], counts = balance.step()
            figures["routed"] = counts[None]
        curve.append(
            Step(
                loss=sum(batch.losses) / len(batch.losses),
                grad_norm=norm,
                chunk_gradients=chunk_gradients(batch.of_chunks, micro_batch_size),
                penalties=penalties.end_step() if penalties is not None else {},
                **figures,
            )
        )
    return curve
