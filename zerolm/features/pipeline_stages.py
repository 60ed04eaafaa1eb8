"""`pipeline.stages`: how long each pipeline stage waits for the others."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from zerolm.features.feature import Feature, Row, RunParts, StepInputs
from zerolm.run_dir.metrics import IDLE_SHARE, SLOWEST_IN_PIPELINE, Metric, Panel

IDLE = Panel(
    "Idle stages",
    smooth=True,
    about="Share of the passes' time that stages wait for hidden states or gradients. With equal "
    "stages and free transfers it is (p - 1) / (m + p - 1), for p stages and m micro-batches.",
)


class PipelineStages(Feature):
    """Measures the time of a reported step's passes, and how much of it each stage waits."""

    name = "pipeline_stages"
    SECTION = "Speed"
    METRICS = (
        Metric(
            IDLE_SHARE,
            "share",
            IDLE,
            "with `pipeline.stages`: share of the passes' time in a step that stages wait for each "
            "other, averaged over the stages",
        ),
        Metric(
            f"{IDLE_SHARE}/stage.<n>",
            "share",
            Panel("Idle time by stage", many=True, ordered=True, smooth=True),
            "the same for one stage, numbered from 0",
        ),
        Metric(
            SLOWEST_IN_PIPELINE,
            "",
            Panel("Slowest stage", smooth=True),
            "with `pipeline.stages`: time that the slowest stage computes in a step, divided by "
            "the mean over the stages; the others wait for it",
        ),
    )

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.layout.stages > 1)

    def attach(self, run: RunParts) -> None:
        from zerolm.model.stages import stage_of

        stage = stage_of(run.engine.module)
        assert stage is not None and stage.link is not None
        self.stage, self.link, self.device = stage.index, stage.link, run.device
        self.replicas = run.layout.replicas
        self.measuring, self.figures = False, dict[str, float]()

    def begin(self, step: StepInputs) -> None:
        self.measuring = step.number % self.settings.log_interval == 0
        self.link.reset()
        self._started = self._now() if self.measuring else 0.0

    def _now(self) -> float:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def sums(self, losses: Sequence[Any]) -> Mapping[str, Any]:
        import torch

        if not self.measuring:
            return {}
        seconds = self._now() - self._started
        figures = {"idle": self.link.idle_seconds(), "seconds": seconds}
        return {
            name: {
                str(self.stage): torch.tensor(
                    value / self.replicas, dtype=torch.float64, device=self.device
                )
            }
            for name, value in figures.items()
        }

    def summed(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        if not figures:
            return
        idle, seconds = figures["idle"], figures["seconds"]
        busy = [seconds[stage] - idle[stage] for stage in seconds]
        self.figures = {
            IDLE_SHARE: sum(idle.values()) / sum(seconds.values()),
            SLOWEST_IN_PIPELINE: max(busy) * len(busy) / max(sum(busy), 1e-9),
        }
        for stage in seconds:
            self.figures[f"{IDLE_SHARE}/stage.{stage}"] = idle[stage] / seconds[stage]

    def row(self, result: Any) -> Row:
        return self.figures if self.measuring else {}
