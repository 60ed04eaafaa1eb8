"""`--corruption_checks`: detect silent hardware errors before a step is applied."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zerolm.config.flag import count, switch
from zerolm.features.feature import Case, Feature, RunParts, StepInputs

MAX_PARAMETERS = 16  # listed in an event


class Integrity(Feature):
    """Repeats a step's forward and backward passes as often as the checks in zerolm/integrity
    require.
    """

    name = "integrity"

    @dataclass(frozen=True)
    class Flags:
        corruption_checks: bool = switch(
            "stability",
            "detect silent hardware errors: compare states between steps, and recompute a step "
            "with suspicious gradients before it is applied",
        )
        replay_interval: int = count(
            "stability",
            "with --corruption_checks: compute the first step after each start twice, and also one "
            "random step in each interval of this length; 0: none",
            "STEPS",
            default=400,
            minimum=0,
        )

    @classmethod
    def notices(cls, case: Case) -> Iterable[str]:
        settings = case.settings
        if "replay_interval" in settings.explicit and not settings.corruption_checks:
            yield f"{settings.where('replay_interval')}: has no effect without --corruption_checks"

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        settings = plan.settings
        if not settings.corruption_checks:
            return {}
        line = "states are compared between steps, suspicious steps recomputed"
        if settings.replay_interval:
            line += f", and one step in {settings.replay_interval} at random"
        return {"silent corruption": line}

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.corruption_checks)

    def attach(self, run: RunParts) -> None:
        from zerolm.integrity.checks import Checks
        from zerolm.model.stages import stage_of

        stage = stage_of(run.engine.module)
        self.journal = run.journal
        self.checks = Checks(
            run.engine,
            partial(run.gate.discard, run.engine),
            interval=self.settings.replay_interval,
            seed=self.settings.seed,
            replicated=run.layout.weights_have_copies(),
            link=None if stage is None else stage.link,
            overflows_are_normal=self.plan.ds.precision == "fp16",
        )

    def loaded(self, state: dict[str, Any]) -> None:
        self.checks.restart()

    def passes(self, compute: Callable[[], Any], step: StepInputs) -> Any:
        return self.checks.checked(step.number, step.batches, compute, step.fault)

    def sums(self, losses: Sequence[Any]) -> Mapping[str, Any]:
        figures = self.checks.figures(losses)
        return {} if figures is None else {"first pass": {"figures": figures}}

    def summed(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        if figures:
            self.checks.summed = figures["first pass"]["figures"]

    def after(self, step: StepInputs, result: Any) -> None:
        self.checks.end_step(step.number)
        if self.checks.replayed is not None:
            self._log(step.number, self.checks.replayed)

    def _log(self, step: int, found: Any) -> None:
        """Log that a step was recomputed, and the result."""
        from zerolm.integrity.checks import shown

        log = self.journal.log
        if found.wrong is not None:
            places = [dict(each) for each in found.places]
            log.event(
                "corrupt_step", step, why=found.why, problem=found.wrong, places=places,
                parameters=list(found.parameters)[:MAX_PARAMETERS],
            )  # fmt: skip
            where = "; ".join(map(shown, found.places))
            self.journal.print_rank0(
                f"step={step} silent corruption: {found.wrong}: {where}; corrected"
            )
        elif found.tolerance is not None:
            log.event("nondeterministic", step, tolerance=found.tolerance)
        else:
            log.event("replayed", step, why=found.why)
