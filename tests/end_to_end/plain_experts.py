"""Routers in plain PyTorch: what they choose, their losses over a batch, and their biases."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch


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
