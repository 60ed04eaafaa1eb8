"""The reference: a pretraining loop in plain PyTorch and transformers, in one process.

It shares only the order of the data with zerolm, which is tested against references of its own.
Weights are initialized as docs/initialization.md specifies; the learning rate is the cosine.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end import plain_optimizers
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
        clipped_to: norm that the gradient was clipped to.
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
    clipped_to: float = math.inf
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


def tokens_by_expert(outputs: Any, top_k: int) -> np.ndarray:
    """Return (layers, experts) numbers of tokens routed to an expert, by sorting the logits."""
    found = []
    for logits in outputs.router_logits:
        best = np.argsort(-logits.detach().float().numpy(), axis=1)[:, :top_k]
        found.append(np.bincount(best.ravel(), minlength=logits.shape[1]))
    return np.array(found)


def router_entropies(outputs: Any) -> np.ndarray:
    shares = [logits.detach().double().softmax(1) for logits in outputs.router_logits]
    return np.array([torch.special.entr(share).sum(1).mean().item() for share in shares])


@dataclass
class Penalties:
    """Losses as means over the global batch, with the given weights: what docs/experts.md defines.

    Attributes:
        balance: E * sum_i f_i P_i, averaged over the routers, with f of the previous batch.
        router_z, z: mean of log(Z)^2, of the routers and of the output.
    """

    top_k: int
    balance: float = 0.0
    router_z: float = 0.0
    z: float = 0.0
    shares: Any = None  # (layers, experts) f of the previous batch
    counts: list[np.ndarray] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, outputs: Any) -> torch.Tensor:
        """Return the sum of the losses of a chunk of the batch."""
        logits = torch.stack(outputs.router_logits).float()  # (layers, tokens, experts)
        experts = logits.shape[2]
        if self.shares is None:
            self.shares = torch.full((len(logits), experts), self.top_k / experts)
        self.counts.append(tokens_by_expert(outputs, self.top_k))
        of_experts = self.shares * torch.softmax(logits, 2).mean(1)
        parts = {
            "train/auxiliary_loss": self.balance * experts * of_experts.sum(1).mean(),
            "train/router_z_loss": self.router_z * (logits.exp().sum(2).log() ** 2).mean(),
            "train/z_loss": self.z * (torch.logsumexp(outputs.logits.float(), 2) ** 2).mean(),
        }
        self.values.append({name: part.item() for name, part in parts.items()})
        return torch.stack(list(parts.values())).sum()

    def end_step(self) -> dict[str, float]:
        counts = torch.tensor(sum(self.counts))
        self.shares = (counts * self.top_k / counts.sum(1, keepdim=True)).float()
        means = {name: np.mean([each[name] for each in self.values]) for name in self.values[0]}
        self.counts, self.values = [], []
        return means


class BiasBalance:
    """Balances experts by a bias (arXiv 2412.19437, section 2.1.2), counted over the batch."""

    def __init__(self, model: torch.nn.Module, rate: float):
        self.rate = rate
        self.biases = {
            name: buffer for name, buffer in model.named_buffers() if "e_score_correction" in name
        }
        self.counts = {name: np.zeros(len(bias), int) for name, bias in self.biases.items()}
        for name in self.biases:
            router = model.get_submodule(name.rpartition(".")[0])
            router.register_forward_hook(partial(self.count, name))

    def count(self, name: str, router: torch.nn.Module, args: Any, output: Any) -> None:
        chosen = output[2].numpy().ravel()
        self.counts[name] += np.bincount(chosen, minlength=len(self.counts[name]))

    def step(self) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """Move the biases; return copies of them, and the (layers, experts) counts."""
        counts = np.array(list(self.counts.values()))
        for bias, count in zip(self.biases.values(), counts, strict=True):
            for expert in range(len(count)):
                if count[expert] * len(count) < count.sum():
                    bias[expert] += self.rate
                if count[expert] * len(count) > count.sum():
                    bias[expert] -= self.rate
        for count in self.counts.values():
            count[:] = 0
        return {name: bias.clone() for name, bias in self.biases.items()}, counts


class ZClip:
    """Algorithm 1 of arXiv 2504.02507, recomputed from all norms at each step."""

    def __init__(self, threshold: float):
        self.threshold, self.norms = threshold, []

    def __call__(self, norm: float) -> float:
        self.norms.append(norm)
        if len(self.norms) < 26:
            return math.inf
        mean, variance = np.mean(self.norms[:25]), np.var(self.norms[:25])
        for each in self.norms[25:]:
            z = (each - mean) / (variance**0.5 + 1e-6)
            bound = mean + self.threshold**2 / z * variance**0.5 if z > self.threshold else math.inf
            mean = 0.97 * mean + 0.03 * min(each, bound)
            variance = 0.97 * variance + 0.03 * (min(each, bound) - mean) ** 2
        return float(bound)


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


def clip(
    masters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    clipping: float,
    zclip: ZClip | None,
) -> tuple[float, float]:
    """Set the clipped gradients of the masters; return (norm before clipping, bound)."""
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    squares = [gradient.double().square().sum() for gradient in gradients]
    bound = min(clipping or math.inf, zclip(sum(squares).sqrt().item()) if zclip else math.inf)
    return torch.nn.utils.clip_grad_norm_(masters, bound).item(), bound


def update(
    model: torch.nn.Module,
    masters: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    after_step: Callable[[], None],
) -> tuple[dict[str, float], dict[str, float]]:
    """Take a step; return the norms of the weights after it, and of their changes."""
    names = [name for name, _ in model.named_parameters()]
    before = [master.clone() for master in masters]
    optimizer.step()
    after_step()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.data.copy_(master)
    changes = [new - old for new, old in zip(masters, before, strict=True)]
    weights = norms_by_block(names, [parameter.detach() for parameter in model.parameters()])
    return weights, norms_by_block(names, changes)


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
    adaptive_clip: float = 0.0,
    source: Path | None = None,
    balance_rate: float | None = None,
    penalties: Penalties | None = None,
    qk_clip: float = 0.0,
    change: Callable[[torch.nn.Module], None] = lambda model: None,
) -> list[Step]:
    """Train by the recipe of the end-to-end tests, and return the figures of each step.

    Args:
        bf16: train bf16 weights with float32 master weights.
        optimizer_of: creates the optimizer from {name: master} and the weight decay; the `ratio` of
            a group multiplies the learning rate of the schedule.
        adaptive_clip: threshold of ZClip; 0 turns it off.
        source: model directory to start from, as `from_pretrained` loads it.
        balance_rate: of the routers' biases; None for a model without them.
        penalties: minimized with the loss, instead of the router loss of each chunk.
        qk_clip: threshold of attention logits; 0: off.
        change: applied to the model before it trains.
    """
    if source is None:
        model = initial_model(config, seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    change(model)
    balance = BiasBalance(model, balance_rate) if balance_rate is not None else None
    if bf16:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    named = {name: each.detach().float().clone() for name, each in model.named_parameters()}
    masters, optimizer = list(named.values()), optimizer_of(named, weight_decay)
    attention = plain_optimizers.QkClip(model, qk_clip) if qk_clip else None
    zclip = ZClip(adaptive_clip) if adaptive_clip else None
    tokens, total_tokens = read_tokens(shards), steps * batch_sequences * seq_len
    order = Order([(len(tokens) - 1) // seq_len], [1.0], seed)
    curve = []
    for step in range(steps):
        windows = order(np.arange(step * batch_sequences, (step + 1) * batch_sequences)).window
        batch = Batch([torch.zeros_like(master) for master in masters])
        for chunk in np.split(windows, batch_sequences // micro_batch_size):
            text = np.stack([tokens[w * seq_len : w * seq_len + seq_len + 1] for w in chunk])
            batch.add(model, config, text, micro_batch_size / batch_sequences, penalties)
        norm, bound = clip(masters, batch.gradients, clipping, zclip)
        done = (step + 1) * batch_sequences * seq_len
        rate = cosine(done, total_tokens, warmup_tokens, peak, minimum)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("ratio", 1.0)
        clipped: list[tuple[float, int]] = []
        weights, updates = update(
            model,
            masters,
            optimizer,
            lambda clipped=clipped: clipped.append(attention.step(named)) if attention else None,
        )
        routing = batch.routing()
        if balance is not None:
            routing["biases"], counts = balance.step()
            routing["routed"] = counts[None]
        curve.append(
            Step(
                loss=sum(batch.losses) / len(batch.losses),
                grad_norm=norm,
                chunk_gradients=chunk_gradients(batch.of_chunks, micro_batch_size),
                param_norms=weights,
                update_ratios={block: updates[block] / weights[block] for block in weights},
                clipped_to=bound,
                penalties=penalties.end_step() if penalties is not None else {},
                attention=clipped[0] if clipped else (0.0, 0),
                **routing,
            )
        )
    return curve
