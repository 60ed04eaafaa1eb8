"""`--agc`: adaptive gradient clipping, by each parameter's ratio of gradient norm to weight norm.

Brock et al. 2021 (https://arxiv.org/abs/2102.06171, section 4.1), with one norm per parameter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerolm.config.flag import real
from zerolm.features.feature import Case, Feature, Row, RunParts
from zerolm.run_dir.metrics import GRADIENT_NORM, Metric, Panel

MIN_WEIGHT_NORM = 1e-3  # of the paper: a parameter of zeros would never change
CLIPPED, NORM = "train/agc_clipped", "train/agc_grad_norm"


class Agc(Feature):
    """Scales down the gradient of each parameter whose norm exceeds a share of the weight's norm.

    Squared norms are summed over ranks along with the losses. `StepGate` calls `clip` after it has
    measured the norm of the whole gradient, and before `gradient_clipping`.
    """

    name = "agc"
    SECTION = "Optimization"
    METRICS = (
        Metric(
            CLIPPED,
            "",
            Panel("Parameters clipped by AGC", smooth=True),
            "with `--agc`: share of the parameter tensors whose gradient the last step clipped",
        ),
        Metric(
            NORM,
            "",
            GRADIENT_NORM,
            "with `--agc`: norm of the gradient after AGC, to which `gradient_clipping` applies",
        ),
    )

    @dataclass(frozen=True)
    class Flags:
        agc: float = real(
            "model",
            "adaptive gradient clipping: limit the gradient norm of each parameter to X times the "
            "norm of its weight; 0.01 is typical, 0: off",
            default=0.0,
            changes_curve=True,
            not_with=dict.fromkeys(
                ("tensor", "sequence"), "norms are summed over the ranks of ZeRO only"
            ),
        )

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        settings, profile = case.settings, case.profile
        if not settings.agc:
            return
        where = f"{settings.where('agc')}: {settings.agc:g}"
        if profile.uses_muon:
            yield (
                f"{where} is not supported together with optimizer.type Muon "
                f"({settings.deepspeed_config}), whose updates have the same size for any gradient "
                f"norm. Use AdamW, or remove the flag."
            )
        for block, device in profile.offloads.items():
            if device == "nvme":
                yield (
                    f"{where}, but {profile.name} has zero_optimization.{block} on NVMe, where "
                    f"gradients and weights cannot be read in each step. Use "
                    f'"device": "cpu", or remove the flag.'
                )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        if not plan.settings.agc:
            return {}
        return {"AGC": f"gradient of each parameter at most {plan.settings.agc:g} x its weight"}

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.agc)

    def attach(self, run: RunParts) -> None:
        self.engine, self.copies = run.engine, run.layout.copies
        trained = (each for each in run.engine.module.named_parameters() if each[1].requires_grad)
        self.parameters = dict(trained)
        self.factors = dict.fromkeys(self.parameters, 1.0)
        self.ratio, self.norm = 1.0, 0.0
        run.gate.clip_parameters = self.clip

    def sums(self, losses: Sequence[Any]) -> Mapping[str, Any]:
        """Return the squared norms of this rank's part of each gradient and of each weight."""
        import torch

        from zerolm.engine.gradients import gradients
        from zerolm.engine.stages import is_copy
        from zerolm.engine.states import master_slice

        zero = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        counted = {name: each for name, each in self.parameters.items() if not is_copy(each)}
        of_gradients = dict.fromkeys(counted, zero)
        of_weights = dict(of_gradients)
        for name, values in gradients(self.engine):
            if name in counted:
                of_gradients[name] = of_gradients[name] + _square(values)
        for name, parameter in counted.items():
            own = master_slice(self.engine, parameter)
            if own is not None:
                of_weights[name] = of_weights[name] + _square(own.values)
        return {"gradients": of_gradients, "weights": of_weights}

    def summed(self, figures: Mapping[str, Mapping[str, float]]) -> None:
        from zerolm.engine.gradients import loss_scale

        scale, of_weights = loss_scale(self.engine), figures["weights"]
        before = after = 0.0
        for name, square in figures["gradients"].items():
            gradient = math.sqrt(square / self.copies) / scale
            weight = math.sqrt(of_weights[name] / self.copies)
            limit = self.settings.agc * max(weight, MIN_WEIGHT_NORM)
            clips = limit < gradient < math.inf  # DeepSpeed skips a step that is not finite
            self.factors[name] = limit / gradient if clips else 1.0
            before += gradient**2
            after += min(gradient, limit) ** 2
        self.norm = math.sqrt(after)
        self.ratio = math.sqrt(after / before) if 0.0 < before < math.inf else 1.0

    def clip(self) -> float:
        """Clip this rank's gradients in place; return the norm afterwards, relative to before."""
        from zerolm.engine.gradients import gradients

        for name, values in gradients(self.engine):
            if self.factors[name] < 1.0:
                values.mul_(self.factors[name])
        return self.ratio

    def row(self, result: Any) -> Row:
        clipped = sum(factor < 1.0 for factor in self.factors.values())
        return {CLIPPED: clipped / len(self.factors), NORM: self.norm}


def _square(values: Any) -> Any:
    """Return the sum of squares in float64 without a copy of the values."""
    import torch

    return torch.linalg.vector_norm(values.detach(), dtype=torch.float64).square()
