"""How the routers of a mixture of experts spread their tokens, on the steps that are reported.

Looks at the logits that the model hands out for its auxiliary loss, on the way of the step itself:
each rank sums what it sees, and the sums go with those of the step in one reduction, so the figures
are those of the global batch on any number of ranks. Between the steps that are measured nothing is
computed; a model that hands out no such logits has no figures. Must not know files or trackers.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

Row = dict[str, float]


def experts_per_token(config: Any) -> int | None:
    """Return how many experts serve a token, None for a model without a router to look at."""
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False) is not True:
        return None
    # DBRX has it in a part of its own
    parts = (text, getattr(text, "ffn_config", None))
    names = ("num_experts_per_tok", "moe_top_k")
    found = (getattr(part, name, None) for part in parts for name in names)
    return next((count for count in found if isinstance(count, int)), None)


class Routing:
    """Sums of one rank over the micro-batches of a step.

    All ranks make the same calls in each step: `begin`, `observe` after each forward pass, `sums`,
    and `row` with what the ranks have together.

    Args:
        config: of the model.
        interval: every so many steps are measured.
    """

    def __init__(self, config: Any, interval: int):
        self._top_k = experts_per_token(config)
        self._interval = interval
        self._measuring = False
        self._experts: list[int] = []  # of each router
        self._sums: list[torch.Tensor] = []

    def begin(self, step: int) -> None:
        """Begin a step, and decide whether it is measured."""
        self._measuring = self._top_k is not None and step % self._interval == 0
        self._experts, self._sums = [], []

    @torch.no_grad()
    def observe(self, outputs: Any) -> None:
        """Take note of a micro-batch.

        Args:
            outputs: of the model; `router_logits` has (tokens, experts) of each router.
        """
        logits = getattr(outputs, "router_logits", None) if self._measuring else None
        if not isinstance(logits, Sequence) or not logits:
            return
        found = [_sums_of(each.detach().float(), self._top_k or 1) for each in logits]
        if self._sums:
            found = [old + new for old, new in zip(self._sums, found, strict=True)]
        self._experts, self._sums = [each.shape[-1] for each in logits], found

    def sums(self, device: torch.device) -> torch.Tensor:
        """Return this rank's sums, (figures,) float64, as long on every rank."""
        return torch.cat([torch.zeros(0, dtype=torch.float64, device=device), *self._sums])

    def row(self, figures: Sequence[float]) -> Row:
        """Return the metrics of the step; none when it was not measured.

        Args:
            figures: the sums of all ranks.
        """
        if not self._experts:
            return {}
        row: Row = {}
        imbalances, entropies, unused, at = [], [], 0, 0
        for number, experts in enumerate(self._experts):
            counts, entropy = figures[at : at + experts], figures[at + experts]
            at += experts + 1
            chosen = sum(counts)
            tokens = chosen / (self._top_k or 1)
            imbalances.append(max(counts) * experts / chosen)
            entropies.append(entropy / (tokens * math.log(experts)) if experts > 1 else 0.0)
            unused += sum(count == 0 for count in counts)
            row[f"router/load_imbalance/router.{number}"] = imbalances[-1]
        return {
            "router/load_imbalance": sum(imbalances) / len(imbalances),
            "router/entropy": sum(entropies) / len(entropies),
            "router/unused_experts": unused / sum(self._experts),
            **row,
        }


def _sums_of(logits_NE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return how often each expert was chosen, and the sum of entropies, (E + 1,) float64.

    A comparison and a sum, not `bincount`, whose order of addition on a GPU changes.
    """
    num_experts = logits_NE.shape[-1]
    chosen = logits_NE.topk(min(top_k, num_experts), dim=-1).indices
    counts = (chosen.flatten()[:, None] == torch.arange(num_experts, device=chosen.device)).sum(0)
    logs = logits_NE.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1, dtype=torch.float64).sum()
    return torch.cat([counts.double(), entropy[None]])
