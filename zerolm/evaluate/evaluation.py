"""`Evaluation`: a suite that models are measured with, with everything that only this suite knows.

It has flags, refusals, a line of the plan, metrics, and the measurement, which is the same in a run
and in `zerolm evaluate`. `EVALUATIONS` in `zerolm/evaluate/__init__.py` lists all of them.

The settings are made of the flags of all evaluations, so a module of an evaluation imports little
at its top, and what its hooks need inside them.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from zerolm.common.errors import ConfigError
from zerolm.common.files import write_json
from zerolm.common.records import unreadable
from zerolm.config.part import Part
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.metrics import Panel

if TYPE_CHECKING:
    from zerolm.evaluate.held_out import HeldOut
    from zerolm.evaluate.runner import ModelRunner
    from zerolm.evaluate.text_coder import TextCoder
    from zerolm.plan.plan import Plan

OWN_TEXTS = "ranks that share a matrix would evaluate different texts"  # no_tensor_parallel
TASKS = Panel("Tasks", points=True, about="Accuracy on downstream tasks, as lm-eval defines it.")


def read_json_lines(path: Path, fix: str) -> Iterator[tuple[int, Any]]:
    """Yield the values of JSON lines with their line numbers.

    Args:
        fix: end of the message of a ConfigError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(unreadable(path, error, f"{fix}.")) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not JSON ({error}). {fix}.") from None


@dataclass(frozen=True)
class Scores:
    """What an evaluation has measured.

    Attributes:
        figures: metrics by name, without `eval/`.
        file: content of the evaluation's file in the run directory, if it has one.
    """

    figures: dict[str, float]
    file: dict[str, Any] = field(default_factory=dict)


class Headline(NamedTuple):
    """A metric that a report shows among its first figures."""

    key: str
    label: str
    template: str
    note: str


class ExportFlag(NamedTuple):
    """A setting that `zerolm evaluate` takes too; what is not given is as in a run."""

    setting: str
    name: str = ""
    default: Any = None
    help: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name or self.setting}"


class Log(Protocol):
    """What an evaluation uses of a run's log (`zerolm.tracking.run_log.RunLog`)."""

    files: RunFiles
    writes: bool

    def has(self, step: int, key: str) -> bool: ...

    def metrics(self, row: dict[str, Any]) -> None: ...

    def samples(self, rows: Sequence[dict[str, Any]]) -> None: ...

    def sampled_tokens(self) -> int: ...

    def event(self, event: str, step: int, **values: Any) -> None: ...


class Evaluation(Part, ABC):
    """A suite that models are measured with.

    Attributes:
        name: its name in events and in the record of attempts, and that of its file.
        setting: the one that turns it on. Its other flags need it.
        requires: settings that it needs besides.
        interval: the setting with the steps between two times.
        on_texts: whether it needs a tokenizer.
        on_every_rank: whether `measure` is called on every rank, and not only on rank 0.
        of_other_weights: whether features' other weights, such as an average, are measured too.
        OUTCOMES: key of each item's outcome in its file; "" if it has no file.
        EXPORT: its flags of `zerolm evaluate`; it is for runs only if there are none.
    """

    name: str
    setting: ClassVar[str]
    requires: ClassVar[Sequence[str]] = ()
    interval: ClassVar[str] = "downstream_interval"
    on_texts: ClassVar[bool] = True
    on_every_rank: ClassVar[bool] = False
    of_other_weights: ClassVar[bool] = False
    OUTCOMES: ClassVar[str] = ""
    SECTION = "Evaluation"
    HEADLINES: ClassVar[tuple[Headline, ...]] = ()
    EXPORT: ClassVar[tuple[ExportFlag, ...]] = ()

    # ---- Before a model is loaded

    @classmethod
    def wanted(cls, settings: Any) -> bool:
        """Return whether the settings ask for it."""
        return all(getattr(settings, name) for name in (cls.setting, *cls.requires))

    @classmethod
    def problems(cls, settings: Any) -> Iterable[str]:
        """Return why a run cannot have its settings, besides flags without `setting`."""
        return ()

    @classmethod
    def check(cls, settings: Any, coder: "TextCoder", max_length: int | None) -> None:
        """Read its inputs before a run; raise a ConfigError if they cannot be used.

        Args:
            max_length: maximum tokens of a text; None if not known.
        """
        cls.build(settings)[0].read()

    @classmethod
    def label(cls, settings: Any) -> str:
        """Return what the plan calls it."""
        return cls.name

    @classmethod
    def summary(cls, plan: "Plan") -> Mapping[str, str]:
        """Return lines of the plan besides that of `label`, whether it is on or off."""
        return {}

    @classmethod
    def build(cls, settings: Any, held_out: "HeldOut | None" = None) -> "Sequence[Evaluation]":
        """Return what is measured, logged and retried on its own."""
        return [cls(settings, held_out)]

    def __init__(self, settings: Any, held_out: "HeldOut | None" = None):
        self.settings, self.held_out = settings, held_out

    def read(self) -> None:
        """Read its inputs, unless they have been read."""

    # ---- A measurement

    @abstractmethod
    def measure(self, runner: "ModelRunner", step: int = 0) -> Scores:
        """Measure the weights that the model has now, which is in evaluation mode.

        On rank 0, while the others compute what it asks the runner for; or on every rank.
        """

    def measure_export(self, runner: "ModelRunner") -> Scores:
        """Measure an exported model, in one process."""
        return self.measure(runner)

    # ---- In a run, on every rank

    def restore(self, log: Log, skipped_tokens: int) -> None:
        """Resume; evaluations are skipped at a step where the run had this many tokens."""

    def due(self, progress: Any, is_due: Callable[[int], bool]) -> bool:
        """Return whether it is due; called once a step.

        Args:
            is_due: interval in steps -> whether it ends at this step.
        """
        interval = getattr(self.settings, self.interval)
        return bool(interval) and is_due(interval)

    @property
    def logged_key(self) -> str:
        """A key for `Log.has`, which it has if it is logged."""
        return f"eval/{self.name}/"

    def shown(self, figures: Mapping[str, float]) -> str:
        """Return the figures as the console shows them."""
        return " ".join(f"{key}={value:.4g}" for key, value in figures.items())

    def record(
        self, scores: Scores, progress: Any, log: Log, print_line: Callable[..., None]
    ) -> None:
        """Log, print and write what was measured, on rank 0."""
        where = {"step": progress.step, "tokens": progress.tokens}
        log.metrics({**where, **{f"eval/{key}": value for key, value in scores.figures.items()}})
        if self.OUTCOMES:
            write_json(log.files.outcomes(self.name), {**where, **scores.file})
        print_line(f"step={progress.step} {self.shown(scores.figures)}")
