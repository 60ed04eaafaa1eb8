"""`RouterMetrics`: load balance and entropy of the routers of a mixture of experts.

Uses the logits that the model returns for its auxiliary loss, in the steps that are reported. Sums
of each rank go into the step's own reduction, so metrics are those of the global batch on any
number of ranks. A model that returns no router logits has no metrics. Must not know files or
trackers.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

Row = dict[str, float]


def experts_per_token(config: Any) -> int | None:
    """Return the number of experts per token; None for a model that returns no router logits."""
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False) is not True:
        return None
    configs = (text, getattr(text, "ffn_config", None))  # the latter for DBRX
    names = ("num_experts_per_tok", "moe_top_k")
    found = (getattr(each, name, None) for each in configs for name in names)
    return next((count for count in found if isinstance(count, int)), None)


class RouterMetrics:
    """Sums of one rank over the micro-batches of a step.

    Every rank makes the same calls in each step: `begin`, `observe` after each forward pass,
    `sums`, and `row` with the sums over ranks.

    Args:
        config: of the model.
        interval: steps between two measurements.
    """

    def __init__(self, config: Any, interval: int):
        self._top_k = experts_per_token(config)
        self._interval = interval
        self._measuring = False
        self._num_experts: list[int] = []  # of each router
        self._sums: list[torch.Tensor] = []

    def begin(self, step: int) -> None:
        """Start a step, and decide whether to measure it."""
        self._measuring = self._top_k is not None and step % self._interval == 0
        self._num_experts, self._sums = [], []

    @torch.no_grad()
    def observe(self, outputs: Any) -> None:
        """Add the router logits of a micro-batch to the sums.

        Args:
            outputs: of the model; `router_logits` has a (tokens, experts) tensor per router.
        """
        logits = getattr(outputs, "router_logits", None) if self._measuring else None
        if not isinstance(logits, Sequence) or not logits:
            return
        found = [_expert_sums(each.detach().float(), self._top_k or 1) for each in logits]
        if self._sums:
            found = [old + new for old, new in zip(self._sums, found, strict=True)]
        self._num_experts, self._sums = [each.shape[-1] for each in logits], found

    def sums(self, device: torch.device) -> torch.Tensor:
        """Return this rank's sums, (figures,) float64, of the same length on every rank."""
        return torch.cat([torch.zeros(0, dtype=torch.float64, device=device), *self._sums])

    def row(self, figures: Sequence[float]) -> Row:
        """Return the metrics of the step; none if it was not measured.

        Args:
            figures: `sums`, summed over ranks.
        """
        if not self._num_experts:
            return {}
        row: Row = {}
        imbalances, entropies, unused, start = [], [], 0, 0
        for number, experts in enumerate(self._num_experts):
            counts, entropy = figures[start : start + experts], figures[start + experts]
            start += experts + 1
            chosen = sum(counts)
            tokens = chosen / (self._top_k or 1)
            imbalances.append(max(counts) * experts / chosen)
            entropies.append(entropy / (tokens * math.log(experts)) if experts > 1 else 0.0)
            unused += sum(count == 0 for count in counts)
            row[f"router/load_imbalance/router.{number}"] = imbalances[-1]
        return {
            "router/load_imbalance": sum(imbalances) / len(imbalances),
            "router/entropy": sum(entropies) / len(entropies),
            "router/unused_experts": unused / sum(self._num_experts),
            **row,
        }


def _expert_sums(logits_NE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the tokens of each expert, and the sum of entropies, (E + 1,) float64.

    Counts with a comparison and a sum, because `bincount` is not deterministic on a GPU.
    """
    num_experts = logits_NE.shape[-1]
    chosen = logits_NE.topk(min(top_k, num_experts), dim=-1).indices
    counts = (chosen.flatten()[:, None] == torch.arange(num_experts, device=chosen.device)).sum(0)
    logs = logits_NE.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1, dtype=torch.float64).sum()
    return torch.cat([counts.double(), entropy[None]])
