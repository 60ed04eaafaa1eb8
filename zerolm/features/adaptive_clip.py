"""`--adaptive_clip`: clip gradient norms that stand out from those of recent steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zerolm.config.flag import real
from zerolm.features.feature import Case, Feature, Row, RunParts, Step
from zerolm.run_dir.metrics import GRADIENT_NORM, Metric


class AdaptiveClip(Feature):
    """Bounds the norm of each step by the statistics of zerolm/optim/adaptive_clip.py."""

    name = "adaptive_clip"
    SECTION = "Optimization"
    METRICS = (
        Metric(
            "train/clip_norm",
            "",
            GRADIENT_NORM,
            "with `--adaptive_clip`: upper bound on the last step's gradient norm; absent "
            "while there is none",
        ),
    )

    @dataclass(frozen=True)
    class Flags:
        adaptive_clip: float = real(
            "stability",
            "clip gradient norms more than Z standard deviations above their moving mean (ZClip), "
            "in addition to gradient_clipping; 0: off",
            shows="Z",
            default=0.0,
            changes_curve=True,
        )

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        """Refuse Muon, whose reported norm is not the gradient's."""
        settings = case.settings
        if settings.adaptive_clip and case.profile.uses_muon:
            yield (
                f"{settings.where('adaptive_clip')}: {settings.adaptive_clip}, but with Muon the "
                f"gradient norm is measured on the orthogonalized update, which clipping would "
                f"only shrink. Remove the flag."
            )

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.adaptive_clip)

    def attach(self, run: RunParts) -> None:
        from zerolm.optim.adaptive_clip import Clipping

        max_norm = self.plan.profile.gradient_clipping or 0.0
        self.clipping = Clipping(max_norm, self.settings.adaptive_clip)
        run.gate.clip_norm = self.clipping.bound

    def loaded(self, state: dict[str, Any]) -> None:
        from zerolm.optim.adaptive_clip import NormStatistics

        self.clipping.statistics = NormStatistics(**state)
        self.state = state

    def after(self, step: Step, result: Any) -> None:
        if result.applied:
            self.clipping.end_step(result.grad_norm)
            self.state = vars(self.clipping.statistics)

    def row(self, result: Any) -> Row:
        return self.clipping.metrics(result.clipped_to)
