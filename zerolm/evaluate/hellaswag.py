"""HellaSwag as in lm-eval: reads items, builds requests, and computes both accuracies.

Zellers et al., "HellaSwag: Can a Machine Really Finish Your
Sentence?" (2019). Source of every step: lm-evaluation-harness 0.4.13, `tasks/hellaswag`, and
`ConfigurableTask.process_results` for the scores.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerolm.common.errors import ConfigError, reason
from zerolm.common.url import hub_client
from zerolm.config.flag import count, flag
from zerolm.evaluate.evaluation import (
    OWN_TEXTS,
    TASKS,
    Evaluation,
    ExportFlag,
    Headline,
    Scores,
    read_json_lines,
)
from zerolm.run_dir.metrics import HIGHER, Metric

if TYPE_CHECKING:
    from zerolm.evaluate.likelihood import Row

KEYS = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SPLIT = "validation"  # the test split has no labels
EXAMPLE = "hellaswag_val.jsonl, or the hub id Rowan/hellaswag"


class HellaSwag(Evaluation):
    """Both accuracies on HellaSwag; `hellaswag.json` records the outcomes."""

    name = setting = "hellaswag"
    OUTCOMES = "outcomes"
    EXPORT = (ExportFlag("hellaswag"), ExportFlag("hellaswag_items", default=0))
    # fmt: off
    METRICS = (
        Metric("eval/hellaswag/acc", "share", TASKS,
            "HellaSwag: share of items whose correct ending has the highest log-likelihood",
            better=HIGHER),
        Metric("eval/hellaswag/acc_norm", "share", TASKS,
            "the same, with log-likelihoods divided by the number of characters", better=HIGHER),
        Metric("eval/hellaswag/items", "items", None,
            "number of HellaSwag items evaluated"),
    )
    # fmt: on
    HEADLINES = (Headline("eval/hellaswag/acc_norm", "HellaSwag", "{:.1%}", "normalized accuracy"),)

    @dataclass(frozen=True)
    class Flags:
        hellaswag: str | None = flag(
            "evaluation",
            "text",
            "evaluate on HellaSwag, from a JSON lines file or a Hugging Face dataset",
            shows="PATH|ID",
            not_with=OWN_TEXTS,
        )
        hellaswag_items: int = count(
            "evaluation",
            "use only the first N items of HellaSwag; 0: all",
            "N",
            minimum=0,
            default=1000,
        )

    @classmethod
    def check(cls, settings: Any, coder: Any, max_length: int | None) -> None:
        suite = cls(settings)
        suite.read()
        if max_length is None:
            return
        try:
            coder.rows([item.requests for item in suite.items], max_length)
        except ConfigError as error:
            name = settings.hellaswag
            raise ConfigError([f"{name}: {problem}" for problem in error.problems]) from None

    @classmethod
    def label(cls, settings: Any) -> str:
        return f"HellaSwag ({settings.hellaswag_items or 'all'} items)"

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.items: list[Item] = []
        self.rows: list[Row] = []  # one per ending

    def read(self) -> None:
        if not self.items:
            self.items = read_items(self.settings.hellaswag, self.settings.hellaswag_items)

    def measure(self, runner: Any, step: int = 0) -> Scores:
        self.read()
        if not self.rows:
            requests = [item.requests for item in self.items]
            self.rows = runner.coder.rows(requests, runner.max_length)
        likelihoods = iter(likelihood for likelihood, _ in runner.score(self.rows))
        outcomes = [outcome(item, [next(likelihoods) for _ in item.endings]) for item in self.items]
        found = accuracies(outcomes)
        figures = {f"hellaswag/{key}": value for key, value in found.items()}
        return Scores(figures, {**found, self.OUTCOMES: [to_json(each) for each in outcomes]})


class Item(NamedTuple):
    """A context, the possible endings, and the index of the correct one."""

    context: str
    endings: list[str]
    label: int

    @property
    def requests(self) -> list[tuple[str, str]]:
        """(context, continuation) for each ending."""
        return [(self.context, f" {ending}") for ending in self.endings]


class Outcome(NamedTuple):
    """A model's scores and predictions for an item."""

    log_likelihoods: list[float]  # of each ending
    prediction: int
    prediction_norm: int  # by log-likelihood per character
    label: int


def read_items(name: str, limit: int = 0) -> list[Item]:
    """Read items from a JSON lines file or from a hub data set's validation split.

    Args:
        name: a file path or a hub id.
        limit: number of items to read from the start; 0 for all.

    Raises:
        ConfigError: there is no such file, or a line is not an item.
    """
    path = Path(name)
    if path.is_file():
        documents = [document for _, document in read_json_lines(path, f"Give {EXAMPLE}")]
    elif HUB_ID.fullmatch(name) and not path.suffix:
        documents = _load_from_hub(name)
    else:
        raise ConfigError(f"{name}: no such file. Give {EXAMPLE}.")
    items = []
    for number, document in enumerate(documents[: limit or None], 1):
        problem = _problem(document)
        if problem:
            raise ConfigError(f"{name}:{number}: {problem}. Give {EXAMPLE}.")
        items.append(item(document))
    if not items:
        raise ConfigError(f"{name}: no items. Give {EXAMPLE}.")
    return items


def _load_from_hub(name: str) -> list[Any]:
    import datasets

    try:
        with hub_client(name):
            return list(datasets.load_dataset(name, split=SPLIT))
    except Exception as error:  # raised because of the hub, the network, the disk or the format
        raise ConfigError(
            f"{name}: neither a file nor a hub data set that can be loaded ({reason(error)}). "
            f"Give {EXAMPLE}."
        ) from None


def _problem(document: Any) -> str | None:
    if not isinstance(document, dict):
        return "not a JSON object"
    missing = [key for key in KEYS if key not in document]
    if missing:
        return f"has no {', '.join(missing)}"
    endings = document["endings"]
    texts = (*(document[key] for key in KEYS[:3]), *(endings if isinstance(endings, list) else ()))
    if (
        not isinstance(endings, list)
        or len(endings) < 2
        or not all(isinstance(t, str) for t in texts)
    ):
        return "activity_label, ctx_a and ctx_b must be strings, and endings a list of strings"
    label = str(document["label"])
    if not label.isdigit() or int(label) >= len(endings):
        return f"label: {document['label']!r} is not the number of an ending"
    if not preprocess(f"{document['activity_label']}: "):
        return "the context is empty"
    return None


def preprocess(text: str) -> str:
    """Remove bracketed markup from WikiHow items."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def item(document: dict[str, Any]) -> Item:
    """Convert a row of the data set to an item."""
    context = f"{document['ctx_a']} {document['ctx_b'].capitalize()}"
    return Item(
        preprocess(f"{document['activity_label']}: {context}"),
        [preprocess(ending) for ending in document["endings"]],
        int(document["label"]),
    )


def outcome(scored: Item, log_likelihoods: Sequence[float]) -> Outcome:
    """Return the indices of the likeliest endings by total score and by score per character. Of
    equal scores, the first wins.
    """
    totals = list(log_likelihoods)
    per_character = [  # an ending that is all markup has no characters left
        likelihood / len(ending) if ending else -math.inf
        for likelihood, ending in zip(totals, scored.endings, strict=True)
    ]
    return Outcome(
        totals, totals.index(max(totals)), per_character.index(max(per_character)), scored.label
    )


def to_json(scored: Outcome) -> dict[str, Any]:
    """Convert an outcome to JSON; numbers that are not finite become None."""
    numbers = [x if math.isfinite(x) else None for x in scored.log_likelihoods]
    return {**scored._asdict(), "log_likelihoods": numbers}


def accuracies(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return `acc`, `acc_norm` (by `prediction_norm`) and the number of `items`."""
    return {
        "acc": sum(each.prediction == each.label for each in outcomes) / len(outcomes),
        "acc_norm": sum(each.prediction_norm == each.label for each in outcomes) / len(outcomes),
        "items": len(outcomes),
    }
