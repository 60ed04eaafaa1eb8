"""`--z_loss`: also minimize the squared log-partition of the output logits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerolm.config.flag import real
from zerolm.features.feature import Feature, Forward, RunParts
from zerolm.run_dir.metrics import Z_LOSS, Metric


class ZLoss(Feature):
    """Adds the weighted mean of log(Z)^2 to the loss, and logs it as a separate metric."""

    name = "z_loss"
    SECTION = "Optimization"
    METRICS = (
        Metric(
            "train/z_loss",
            "nats",
            Z_LOSS,
            "with `--z_loss`: the weighted z-loss of the output logits; not included in "
            "`train/loss`",
        ),
    )

    @dataclass(frozen=True)
    class Flags:
        z_loss: float = real(
            "model",
            "weight of the mean squared log-partition of the output logits; 0.0001 or less is "
            "typical, 0: off",
            default=0.0,
            changes_curve=True,
        )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        return {"z-loss": f"weight {plan.settings.z_loss:g}"} if plan.settings.z_loss else {}

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.z_loss)

    def change_model(self, model: Any) -> None:
        from zerolm.model.chunked_loss import find_chunked_head

        if (head := find_chunked_head(model)) is not None:
            head.squares = True

    def attach(self, run: RunParts) -> None:
        self.engine = run.engine

    def losses(self, forward: Forward) -> Mapping[str, Any]:
        from zerolm.model.loss import divided, squared_log_partitions

        squares_BT = squared_log_partitions(
            self.engine, forward.outputs, forward.batch, forward.losses_BT
        )
        return {"train/z_loss": squares_BT.sum() * divided(self.settings.z_loss, forward.targets)}
