"""`Evaluation`: base class of evaluation suites; a subclass contains everything specific to a
suite.

A subclass defines the suite's flags, refusals, lines in the plan, metrics, and measurement, which
is the same in a run and in `zerolm evaluate`. `EVALUATIONS` in `zerolm/evaluate/__init__.py` lists
all subclasses.

The settings include the flags of all evaluations, so each evaluation module imports little at its
top; imports that only a hook needs are inside the hook.
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

OWN_TEXTS = {"tensor": "ranks that share a matrix would evaluate different texts"}  # not_with
TASKS = Panel("Tasks", points=True, about="Accuracy on downstream tasks, as defined by lm-eval.")


def read_json_lines(path: Path, fix: str) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) for each line of a JSON lines file.

    Args:
        fix: last sentence of the ConfigError's message.
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
    """The results of an evaluation.

    Attributes:
        figures: metrics by name, without the prefix `eval/`.
        file: content of the evaluation's file in the run directory, if any.
    """

    figures: dict[str, float]
    file: dict[str, Any] = field(default_factory=dict)


class Headline(NamedTuple):
    """A metric shown among the first figures of a report."""

    key: str
    label: str
    template: str
    note: str


class ExportFlag(NamedTuple):
    """A setting that `zerolm evaluate` also accepts; omitted fields are as for the setting of a
    run.
    """

    setting: str
    name: str = ""
    default: Any = None
    help: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name or self.setting}"


class Log(Protocol):
    """The part of a run's log (`zerolm.tracking.run_log.RunLog`) that evaluations use."""

    files: RunFiles
    writes: bool

    def has(self, step: int, key: str) -> bool: ...

    def metrics(self, row: dict[str, Any]) -> None: ...

    def samples(self, rows: Sequence[dict[str, Any]]) -> None: ...

    def sampled_tokens(self) -> int: ...

    def event(self, event: str, step: int, **values: Any) -> None: ...


class Evaluation(Part, ABC):
    """An evaluation suite, such as a benchmark or the validation loss.

    Attributes:
        name: the suite's name in events and in the record of attempts, and the name of its file.
        setting: name of the setting that turns the suite on; the suite's other flags require it.
        requires: names of other settings that the suite needs.
        interval: name of the setting for the number of steps between evaluations.
        on_texts: whether the suite needs a tokenizer.
        on_every_rank: whether `measure` is called on every rank, not only on rank 0.
        of_other_weights: whether the suite also measures other weights from features, such as an
            average.
        OUTCOMES: key of the items' outcomes in the suite's file; "" if there is no file.
        EXPORT: the suite's flags in `zerolm evaluate`; empty if the suite supports only runs.
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
        """Return whether the settings turn the suite on."""
        return all(getattr(settings, name) for name in (cls.setting, *cls.requires))

    @classmethod
    def problems(cls, settings: Any) -> Iterable[str]:
        """Return problems with the suite's settings, except for flags given without `setting`."""
        return ()

    @classmethod
    def check(cls, settings: Any, coder: "TextCoder", max_length: int | None) -> None:
        """Read the inputs before a run; raise a ConfigError if they cannot be used.

        Args:
            max_length: maximum number of tokens in a text; None if unknown.
        """
        cls.build(settings)[0].read()

    @classmethod
    def label(cls, settings: Any) -> str:
        """Return the suite's name in the plan."""
        return cls.name

    @classmethod
    def summary(cls, plan: "Plan") -> Mapping[str, str]:
        """Return further lines for the plan, whether the suite is on or off."""
        return {}

    @classmethod
    def build(cls, settings: Any, held_out: "HeldOut | None" = None) -> "Sequence[Evaluation]":
        """Return the suite's evaluations, each to be measured, logged and retried separately."""
        return [cls(settings, held_out)]

    def __init__(self, settings: Any, held_out: "HeldOut | None" = None):
        self.settings, self.held_out = settings, held_out

    def read(self) -> None:
        """Read the inputs if they have not been read yet."""

    # ---- A measurement

    @abstractmethod
    def measure(self, runner: "ModelRunner", step: int = 0) -> Scores:
        """Measure the model's current weights. The model is in evaluation mode.

        Called on rank 0 while the other ranks serve the runner's requests; if `on_every_rank`, on
        every rank.
        """

    def measure_export(self, runner: "ModelRunner") -> Scores:
        """Measure an exported model in a single process."""
        return self.measure(runner)

    # ---- In a run, on every rank

    def restore(self, log: Log, skipped_tokens: int) -> None:
        """Resume; `skipped_tokens` is the token count at the last disabled step, or 0."""

    def due(self, progress: Any, is_due: Callable[[int], bool]) -> bool:
        """Return whether the evaluation is due; called once per step.

        Args:
            is_due: takes an interval in steps; returns whether one ends at this step.
        """
        interval = getattr(self.settings, self.interval)
        return bool(interval) and is_due(interval)

    @property
    def logged_key(self) -> str:
        """The key for which `Log.has` returns true once the results are logged."""
        return f"eval/{self.name}/"

    def shown(self, figures: Mapping[str, float]) -> str:
        """Format the figures for the console."""
        return " ".join(f"{key}={value:.4g}" for key, value in figures.items())

    def record(
        self, scores: Scores, progress: Any, log: Log, print_line: Callable[..., None]
    ) -> None:
        """Log, print and write the results; called on rank 0."""
        where = {"step": progress.step, "tokens": progress.tokens}
        log.metrics({**where, **{f"eval/{key}": value for key, value in scores.figures.items()}})
        if self.OUTCOMES:
            write_json(log.files.outcomes(self.name), {**where, **scores.file})
        print_line(f"step={progress.step} {self.shown(scores.figures)}")
