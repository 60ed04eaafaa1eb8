"""`--expert_parallel`: how evenly tokens are distributed over the ranks that have the experts."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from zerolm.features.feature import Batch, Feature, Row, RunParts, StepInputs
from zerolm.run_dir.metrics import RANK_IMBALANCE, Metric, Panel


class ExpertRanks(Feature):
    """Counts the rows that each rank's experts get in the forward passes of reported steps."""

    name = "expert_ranks"
    SECTION = "Routers"
    METRICS = (
        Metric(
            RANK_IMBALANCE,
            "",
            Panel(
                "Balance over ranks",
                smooth=True,
                about="Tokens that the experts of the busiest rank get, divided by the mean over "
                "all ranks that have the layer; averaged over the layers. 1 is balanced.",
            ),
            "with `--expert_parallel`: tokens that the experts of the busiest rank get in a layer, "
            "divided by the mean over all ranks that have the layer; averaged over the layers. The "
            "busiest rank sets the pace and has the largest activations",
        ),
    )

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.layout.experts > 1)

    def attach(self, run: RunParts) -> None:
        from zerolm.model.experts import expert_modules

        self.device = run.device
        self.with_same_layers = run.layout.axis("zero", run.rank)
        self.layers = expert_modules(run.engine.module)
        self.rows = dict.fromkeys(self.layers, 0)
        self.measuring, self.imbalance = False, 0.0

    def begin(self, step: StepInputs) -> None:
        self.measuring = step.number % self.settings.log_interval == 0
        self.rows = dict.fromkeys(self.layers, 0)

    def forward(self, batch: Batch) -> AbstractContextManager[None]:
        return self._counting()

    @contextmanager
    def _counting(self) -> Any:
        yield
        for name, layer in self.layers.items():
            self.rows[name] += layer.zerolm_rows

    def sums(self, losses: Sequence[Any]) -> Mapping[str, Any]:
        import torch

        if not self.measuring:
            return {}
        ranks = self.with_same_layers
        by_rank = torch.zeros(len(self.rows), ranks.size, dtype=torch.float64)
        by_rank[:, ranks.index] = torch.tensor([*self.rows.values()], dtype=torch.float64)
        return {"rows": dict(zip(self.rows, by_rank.to(self.device), strict=True))}

    def summed(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        if not figures:
            return
        ratios = [max(each) * len(each) / sum(each) for each in figures["rows"].values()]
        self.imbalance = sum(ratios) / len(ratios)

    def row(self, result: Any) -> Row:
        return {RANK_IMBALANCE: self.imbalance} if self.measuring else {}
