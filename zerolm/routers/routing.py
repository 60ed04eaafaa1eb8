"""`Routing`: measure and adjust the routers of a mixture-of-experts model in each step.

In reported steps, `RouterMetrics` measures load balance and entropy from the logits that the model
returns for its auxiliary loss. For routers with a bias, `Routing` also counts the chosen experts
and updates the biases. The ranks' sums are added in the step's reduction, so metrics and biases
describe the global batch for any number of ranks, ZeRO stage and micro-batch size. Must not depend
on files or trackers.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from zerolm.model.architecture import experts_per_token, router_loss_coefficient
from zerolm.model.loss import balance_loss, choice_shares, expert_choices, router_z_loss
from zerolm.routers.biased_routers import ExpertLoads, biased_routers, update_biases
from zerolm.run_dir.metrics import AUXILIARY

Row = dict[str, float]
Item = TypeVar("Item")


class Routing:
    """The routers in one rank's model.

    In each step every rank calls `begin`, then `observing` around each forward pass and `observe`
    and `losses` after it, then `sums`, `row` with the sums over ranks, and `end_step`.

    Args:
        model: the engine's module.
        interval: steps between two measurements.
        balance_rate: change of each bias per step; 0 leaves the biases unchanged.
        compiled: whether blocks are compiled, so the chosen experts cannot be counted.
        global_loss: whether to replace the model's router loss, computed per micro-batch, with the
            loss of the global batch.
        z_loss: weight of the routers' mean squared log-partition function.
        first, routers: number of the model's first router among those of all pipeline stages, and
            the number of all; None: this model has all.
        biased: whether routers of some pipeline stage have a bias, if this model has none.

    Attributes:
        state: JSON state saved in checkpoints: with `global_loss`, the `loads` of each router in
            the last applied step.
    """

    def __init__(
        self,
        model: Any,
        interval: int,
        *,
        balance_rate: float = 0.0,
        compiled: bool = False,
        global_loss: bool = False,
        z_loss: float = 0.0,
        first: int = 0,
        routers: int | None = None,
        biased: bool = False,
    ):
        self._first, self._num_routers = first, routers
        self._metrics = RouterMetrics(model.config, 1 if global_loss else interval, first)
        self._top_k = experts_per_token(model.config) or 1
        self._coefficient = router_loss_coefficient(model.config) or 0.0
        self.global_loss, self._z_loss = global_loss, z_loss
        self._logits: Sequence[torch.Tensor] = ()  # router logits of the last micro-batch
        self._shares: list[torch.Tensor] = []  # set in the first micro-batch of a step
        self.state: dict[str, Any] = {}
        self._interval, self._rate = interval, balance_rate
        self._routers = [] if compiled else biased_routers(model)
        self._counter = ExpertLoads(self._routers)
        self._counts = bool(self._routers) or biased  # the same on every rank
        self._loads: dict[str, list[int]] = {}  # of the last step, by router, if counted
        self._measuring = self._counting = False

    def begin(self, step: int) -> None:
        """Start a step, and determine what to measure in this step."""
        self._measuring = step % self._interval == 0
        self._counting = self._counts and (self._rate > 0 or self._measuring)
        self._metrics.begin(step)
        self._counter.reset()
        self._shares = []

    def observing(self) -> AbstractContextManager[None]:
        """Return a context manager for a micro-batch's forward pass, which counts choices if
        required.
        """
        return self._counter.counting() if self._counting else nullcontext()

    def observe(self, outputs: Any) -> None:
        """Add a micro-batch's outputs to the measurements of the step."""
        self._metrics.observe(outputs)
        if self.global_loss or self._z_loss:
            self._logits = outputs.router_logits

    def losses(self, tokens: int) -> dict[str, torch.Tensor]:
        """Return the last micro-batch's share of the weighted router losses, by metric name.

        Args:
            tokens: number of tokens in the global batch.
        """
        logits, self._logits, found = self._logits, (), {}
        if not logits:  # a pipeline stage without routers
            return {}
        share = len(logits) / (self._num_routers or len(logits))  # the losses are means
        if self.global_loss:
            if not self._shares:  # copied to the device once per step
                loads = self.state.get("loads", [])[self._first :][: len(logits)]
                self._shares = choice_shares(logits, loads, self._top_k)
            loss = balance_loss(logits, self._shares, tokens)
            found[AUXILIARY] = self._coefficient * share * loss
        if self._z_loss:
            found["train/router_z_loss"] = self._z_loss * share * router_z_loss(logits, tokens)
        return found

    def sums(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's terms: {group: {router: float64 (n,)}}, with groups of the step."""
        found = {}
        if self._counting:
            counts: Sequence[torch.Tensor] = ()
            if self._routers:
                counts = self._counter.counts().double().split(self._counter.num_experts)
            found["loads"] = _by_router(counts, self._first)
        return found | self._metrics.sums()

    def row(self, figures: Mapping[str, Mapping[str, Sequence[float]]]) -> Row:
        """Return the metrics of the step; none if it was not measured.

        Args:
            figures: the result of `sums`, summed over ranks.
        """
        loads = figures.get("loads", {})
        self._loads = {name: [*map(int, each)] for name, each in loads.items()}
        row = self._metrics.row(figures.get("logits", {}))
        if not self._measuring:
            return {}
        # Metrics of the actual choices, which use the biases, replace metrics of the largest
        # logits.
        return row | (balance_row([*self._loads.values()]) if self._loads else {})

    def end_step(self, applied: bool) -> None:
        """Update the biases and store the loads, if the step was applied."""
        if applied and self._rate:
            own = _by_router(self._routers, self._first)
            update_biases(self._routers, [self._loads[name] for name in own], self._rate)
        if applied and self.global_loss:
            self.state = {"loads": self._metrics.loads}


class RouterMetrics:
    """One rank's sums over the micro-batches in a step.

    In each step every rank calls `begin`, then `observe` after each forward pass, then `sums`, and
    `row` with the sums over ranks.

    Args:
        interval: steps between two measurements.
        first: see `Routing`.

    Attributes:
        loads: for each router, the number of tokens per expert in the last measured step.
    """

    def __init__(self, config: Any, interval: int, first: int = 0):
        self._first = first
        self._top_k = experts_per_token(config)
        self._interval = interval
        self._measuring = False
        self.loads: list[list[int]] = []
        self._sums: list[torch.Tensor] = []

    def begin(self, step: int) -> None:
        """Start a step, and determine whether to measure it."""
        self._measuring = self._top_k is not None and step % self._interval == 0
        self._sums = []

    @torch.no_grad()
    def observe(self, outputs: Any) -> None:
        """Add the router logits of a micro-batch to the sums.

        Args:
            outputs: the model's outputs, whose `router_logits` are a (tokens, experts) tensor per
                router.
        """
        logits = getattr(outputs, "router_logits", None) if self._measuring else None
        if not isinstance(logits, Sequence) or not logits:
            return
        found = [_expert_sums(each.detach().float(), self._top_k or 1) for each in logits]
        if self._sums:
            found = [old + new for old, new in zip(self._sums, found, strict=True)]
        self._sums = found

    def sums(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's terms of the metrics; none if the step is not measured."""
        return {"logits": _by_router(self._sums, self._first)} if self._measuring else {}

    def row(self, figures: Mapping[str, Sequence[float]]) -> Row:
        """Return the metrics of the step; none if it was not measured.

        Args:
            figures: the group of `sums`, summed over ranks.
        """
        if not figures:
            return {}
        loads: list[list[int]] = []
        entropies = []
        for *load, entropy in figures.values():
            loads.append([*map(int, load)])
            tokens, experts = sum(loads[-1]) / (self._top_k or 1), len(load)
            entropies.append(entropy / (tokens * math.log(experts)) if experts > 1 else 0.0)
        self.loads = loads
        return {"router/entropy": sum(entropies) / len(entropies), **balance_row(loads)}


def balance_row(loads: Sequence[Sequence[float]]) -> Row:
    """Return metrics of how evenly tokens are distributed over experts.

    Args:
        loads: for each router, the number of tokens per expert in the global batch.
    """
    imbalances = [max(load) * len(load) / sum(load) for load in loads]
    unused = sum(tokens == 0 for load in loads for tokens in load)
    return {
        "router/load_imbalance": sum(imbalances) / len(imbalances),
        "router/unused_experts": unused / sum(map(len, loads)),
        **{f"router/load_imbalance/router.{n}": each for n, each in enumerate(imbalances)},
    }


def _by_router(figures: Sequence[Item], first: int) -> dict[str, Item]:
    return {f"router.{number}": each for number, each in enumerate(figures, first)}


def _expert_sums(logits_NE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the number of tokens per expert and then the sum of entropies: (E + 1,) float64."""
    counts = expert_choices(logits_NE, top_k)
    logs = logits_NE.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1, dtype=torch.float64).sum()
    return torch.cat([counts.double(), entropy[None]])
