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
                "all ranks; averaged over the layers. 1 is balanced.",
            ),
            "with `--expert_parallel`: tokens that the experts of the busiest rank get in a layer, "
            "divided by the mean over all ranks; averaged over the layers. The busiest rank sets "
            "the pace and has the largest activations",
        ),
    )

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.layout.experts > 1)

    def attach(self, run: RunParts) -> None:
        from zerolm.model.experts import expert_modules

        self.rank, self.ranks, self.device = run.rank, run.layout.world_size, run.device
        self.layers = list(expert_modules(run.engine.module).values())
        self.rows = [0] * len(self.layers)
        self.measuring, self.imbalance = False, 0.0

    def begin(self, step: StepInputs) -> None:
        self.measuring = step.number % self.settings.log_interval == 0
        self.rows = [0] * len(self.layers)

    def forward(self, batch: Batch) -> AbstractContextManager[None]:
        return self._counting()

    @contextmanager
    def _counting(self) -> Any:
        yield
        for number, layer in enumerate(self.layers):
            self.rows[number] += layer.zerolm_rows

    def sums(self, losses: Sequence[Any]) -> Mapping[str, Any]:
        import torch

        if not self.measuring:
            return {}
        rows = torch.zeros(len(self.layers), self.ranks, dtype=torch.float64)
        rows[:, self.rank] = torch.tensor(self.rows, dtype=torch.float64)
        return {"rows": {"by_rank": rows.flatten().to(self.device)}}

    def summed(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        if not figures:
            return
        rows = figures["rows"]["by_rank"]
        layers = [rows[start : start + self.ranks] for start in range(0, len(rows), self.ranks)]
        ratios = [max(each) * len(each) / sum(each) for each in layers]
        self.imbalance = sum(ratios) / len(ratios)

    def row(self, result: Any) -> Row:
        return {RANK_IMBALANCE: self.imbalance} if self.measuring else {}
