"""`--ema_tokens`: maintain a moving average of the weights, and evaluate it as well."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from zerolm.common.values import shown_bytes
from zerolm.config.flag import count
from zerolm.features.feature import Case, Feature, RunParts, StepInputs
from zerolm.run_dir.metrics import BITS_PER_BYTE, LOSS, LOWER, Metric, Panel

BYTES = 4  # float32, per parameter


class Ema(Feature):
    """Updates the average in zerolm/engine/ema.py, which is stored as an optimizer state.

    `zerolm export --ema` reads the average from a checkpoint's files.
    """

    name = "ema"
    SECTION = "Loss"
    METRICS = (
        Metric(
            "eval/ema_loss",
            "nats per token",
            LOSS,
            "with `--ema_tokens`: `eval/loss` with the moving average of the weights",
            better=LOWER,
        ),
        Metric("eval/ema_perplexity", "", None, "`exp(eval/ema_loss)`", better=LOWER),
        Metric(
            "eval/ema_bits_per_byte",
            "bits per byte",
            BITS_PER_BYTE,
            "with `--ema_tokens`: `eval/bits_per_byte` with the moving average of the weights",
            better=LOWER,
        ),
        Metric(
            "eval/<source>/ema_loss",
            "nats per token",
            Panel("Evaluation by source", many=True, points=True),
            "with `--ema_tokens`: `eval/ema_loss` for one source",
            better=LOWER,
        ),
        Metric(
            "eval/<source>/ema_bits_per_byte",
            "bits per byte",
            Panel("Evaluation by source, bits per byte", many=True, points=True),
            "with `--ema_tokens`: `eval/ema_bits_per_byte` for one source",
            better=LOWER,
        ),
    )

    @dataclass(frozen=True)
    class Flags:
        ema_tokens: int = count(
            "budget",
            "maintain and evaluate an exponential moving average of the weights with this "
            "half-life; 0: off",
            "TOKENS",
            default=0,
            minimum=0,
            changes_curve=True,
            planned=True,
        )

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        settings = case.settings
        if not settings.ema_tokens:
            return ()
        from zerolm.ds_config.optimizers import master_problems

        where = f"{settings.where('ema_tokens')}: {settings.ema_tokens}"
        return master_problems(case.profile, where, "averaged", "an average")

    @classmethod
    def state_bytes(cls, settings: Any) -> int:
        return BYTES if settings.ema_tokens else 0

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        if not plan.settings.ema_tokens:
            return {}
        place = "on the device" if plan.ds.optimizer_offload == "none" else "on the host"
        size = shown_bytes(BYTES * plan.model.num_parameters / plan.layout.ranks_per_copy)
        half_life = f"half-life {plan.settings.ema_tokens:,} tokens"
        return {"average": f"of the weights, {half_life}, about {size} per rank {place}"}

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.ema_tokens)

    @classmethod
    def absent(cls, run: RunParts) -> None:
        from zerolm.engine import ema

        ema.drop(run.engine)

    def attach(self, run: RunParts) -> None:
        from zerolm.engine import ema

        self.engine = run.engine
        self.average = ema.Ema(run.engine, self.settings.ema_tokens)

    def loaded(self, state: dict[str, Any]) -> None:
        """Use the loaded average; if there is none, start a new one at the next step."""
        from zerolm.engine import ema

        self.state = state
        if not state:  # --init_optimizer may have loaded an average
            ema.drop(self.engine)
        assert not state or self.average.is_complete

    def after(self, step: StepInputs, result: Any) -> None:
        if result.applied:
            counted = self.average.update(self.state.get("counted", 0.0), step.tokens)
            self.state = {"counted": counted}

    def weights(self) -> Mapping[str, AbstractContextManager[Any]]:
        return {"ema": self.average.swapped_in()} if self.state else {}
