"""DCLM's CORE as nanochat computes it: reading the bundle, building prompts, and scoring.

Li et al., "DataComp-LM" (https://arxiv.org/abs/2406.11794),
section 3.5. Source of every step: nanochat 92d63d4, `core_eval.py` and `base_eval.py`; the
differences are in docs/evaluation.md.
"""

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerolm.common.errors import ConfigError, reason
from zerolm.config.flag import count, flag
from zerolm.evaluate.evaluation import (
    OWN_TEXTS,
    Evaluation,
    ExportFlag,
    Headline,
    Scores,
    read_json_lines,
)
from zerolm.run_dir.metrics import HIGHER, Metric, Panel

if TYPE_CHECKING:
    from zerolm.evaluate.likelihood import Row
    from zerolm.evaluate.text_coder import TextCoder

CONFIG, META_DATA, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
CHOICES, SCHEMA, LANGUAGE_MODELING = "multiple_choice", "schema", "language_modeling"
SHUFFLE_SEED, FEWSHOT_SEED = 1337, 1234
CHUNK_ITEMS = 256  # maximum number of items whose prompts are in memory at the same time
EXAMPLE = "the unpacked eval_bundle, see docs/evaluation.md"

Item = dict[str, Any]


class Core(Evaluation):
    """Centered accuracy of each task, and the mean over tasks; `core.json` records the outcomes."""

    name = setting = "core"
    logged_key = "eval/core"
    OUTCOMES = "tasks"
    EXPORT = (ExportFlag("core"), ExportFlag("core_items", default=0))
    # fmt: off
    METRICS = (
        Metric("eval/core", "share",
            Panel("CORE", points=True,
                about="Mean centered accuracy of the CORE tasks: random answers score 0."),
            "mean of the centered accuracies of the CORE tasks, as defined by DCLM and nanochat: "
            "random answers score 0, perfect ones 1", better=HIGHER),
        Metric("eval/core/<task>", "share",
            Panel("CORE by task", many=True, points=True,
                about="Centered accuracy of each task: random answers score 0."),
            "centered accuracy of one CORE task", better=HIGHER),
    )
    # fmt: on
    HEADLINES = (Headline("eval/core", "CORE", "{:.4f}", "mean centered accuracy"),)

    @dataclass(frozen=True)
    class Flags:
        core: str | None = flag(
            "evaluation",
            "text",
            "evaluate on CORE, the 22 DCLM tasks; directory of the unpacked eval_bundle",
            shows="DIR",
            not_with=OWN_TEXTS,
        )
        core_items: int = count(
            "evaluation",
            "use only N items of each CORE task; 0: all",
            "N",
            minimum=0,
            default=500,
        )

    @classmethod
    def label(cls, settings: Any) -> str:
        return f"CORE ({settings.core_items or 'all'} items per task)"

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.tasks: list[Task] = []

    def read(self) -> None:
        if not self.tasks:
            self.tasks = read_bundle(self.settings.core, self.settings.core_items)

    def measure(self, runner: Any, step: int = 0) -> Scores:
        self.read()
        correct: list[list[bool]] = [[] for _ in self.tasks]
        for number, items in chunks(self.tasks):
            task = self.tasks[number]
            rows = [item_rows(task, item, runner.coder, runner.max_length) for item in items]
            scores = iter(runner.score([row for of_item in rows for row in of_item]))
            correct[number] += [
                is_correct(task, item, of_item, [next(scores) for _ in of_item])
                for item, of_item in zip(items, rows, strict=True)
            ]
        found = figures(self.tasks, correct)
        return Scores(found, {"core": found["core"], self.OUTCOMES: to_json(self.tasks, correct)})


class Task(NamedTuple):
    """A task in the bundle.

    Attributes:
        kind: `CHOICES`, `SCHEMA` or `LANGUAGE_MODELING`.
        baseline: expected accuracy of random answers.
        items: the task's items after shuffling, possibly cut to a maximum number.
    """

    label: str
    kind: str
    num_fewshot: int
    delimiter: str
    baseline: float
    items: list[Item]

    def centered(self, accuracy: float) -> float:
        """Return an accuracy scaled so that random answers score 0."""
        return (accuracy - self.baseline) / (1.0 - self.baseline)


# -------------------------------------------------------------------------------------------------
# The bundle


def read_bundle(directory: str | Path, limit: int = 0) -> list[Task]:
    """Read the tasks of a bundle and their items.

    Args:
        limit: maximum number of items per task, applied after shuffling; 0 for all.
    """
    base = Path(directory)
    config, baselines = _read_config(base / CONFIG), _read_baselines(base / META_DATA)
    tasks, problems = [], []
    for number, entry in enumerate(config):
        try:
            tasks.append(_read_task(base, entry, f"icl_tasks[{number}]", baselines, limit))
        except ConfigError as error:
            problems += error.problems
    labels = [task.label for task in tasks]
    problems += [
        f"{base / CONFIG}: {label} is listed twice. Remove one of them."
        for label in sorted({label for label in labels if labels.count(label) > 1})
    ]
    if problems:
        raise ConfigError(problems)
    return tasks


def _read_config(path: Path) -> list[Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {_reason(error)}. Give {EXAMPLE}.") from None
    tasks = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(tasks, list) or not tasks:
        raise ConfigError(f"{path}: icl_tasks is not a list of tasks. Give {EXAMPLE}.")
    return tasks


def _read_baselines(path: Path) -> dict[str, float]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {
                row["Eval Task"]: float(row["Random baseline"]) / 100
                for row in csv.DictReader(file)
            }
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ConfigError(
            f"{path}: {_reason(error)}. It needs the columns Eval Task and Random baseline. "
            f"Give {EXAMPLE}."
        ) from None


def _reason(error: Exception) -> str:
    return f"cannot be read ({reason(error)})"


def _read_task(base: Path, entry: Any, where: str, baselines: dict[str, float], limit: int) -> Task:
    config = base / CONFIG
    try:
        label, kind, uri = (str(entry[key]) for key in ("label", "icl_task_type", "dataset_uri"))
        num_fewshot = int(entry["num_fewshot"][0])
        delimiter = str(entry.get("continuation_delimiter", " "))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise ConfigError(
            f"{config}: {where}: needs label, icl_task_type, dataset_uri and num_fewshot: [N]. "
            f"Give {EXAMPLE}."
        ) from None
    if kind not in KEYS:
        raise ConfigError(
            f"{config}: {label}: icl_task_type {kind!r} must be one of {', '.join(KEYS)}."
        )
    baseline = baselines.get(label, math.nan)
    if not baseline < 1:
        raise ConfigError(f"{base / META_DATA}: no random baseline below 100 for {label}.")
    path = base / DATA / uri
    items = _read_items(path, kind)
    random.Random(SHUFFLE_SEED).shuffle(items)
    items = items[: limit or None]
    if len(items) <= num_fewshot:
        raise ConfigError(
            f"{path}: {len(items)} items are too few for {num_fewshot} examples and a question. "
            f"Restore the file, or use more items."
        )
    return Task(label, kind, num_fewshot, delimiter, baseline, items)


def _read_items(path: Path, kind: str) -> list[Item]:
    items = []
    for number, item in read_json_lines(path, "Restore the file"):
        if problem := _problem(item, kind):
            raise ConfigError(f"{path}:{number}: {problem}. Restore the file.")
        items.append(item)
    return items


# An item's keys for the text shared by all options, and for the options.
KEYS = {
    CHOICES: ("query", "choices"),
    SCHEMA: ("continuation", "context_options"),
    LANGUAGE_MODELING: ("context", "continuation"),
}


def _problem(item: Any, kind: str) -> str | None:
    keys = KEYS[kind]
    missing = [key for key in keys if not isinstance(item, dict) or key not in item]
    if missing:
        return f"not a JSON object with {' and '.join(missing)}"
    if kind == LANGUAGE_MODELING:
        return None if all(map(_is_text, map(item.get, keys))) else f"{keys} must be strings"
    text, options, gold = item[keys[0]], item[keys[1]], item.get("gold")
    if not _is_text(text) or not isinstance(options, list) or not all(map(_is_text, options)):
        return f"{keys[0]} must be a string, and {keys[1]} a list of strings"
    if type(gold) is not int or not 0 <= gold < len(options):
        return f"gold: {gold!r} is not the number of one of the {len(options)} {keys[1]}"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


# -------------------------------------------------------------------------------------------------
# Prompts


def prompts(task: Task, number: int) -> list[str]:
    """Return an item's prompts, one per option; each starts with the examples.

    A language modeling item has two prompts: one without and one with the continuation.
    """
    item, delimiter = task.items[number], task.delimiter
    others = [other for other in range(len(task.items)) if other != number]
    generator = random.Random(FEWSHOT_SEED + number)
    chosen = generator.sample(others, task.num_fewshot) if task.num_fewshot else []
    examples = "".join(f"{_solved(task, task.items[each])}\n\n" for each in chosen)
    if task.kind == CHOICES:
        return [f"{examples}{item['query']}{delimiter}{choice}" for choice in item["choices"]]
    if task.kind == SCHEMA:
        ending = f"{delimiter}{item['continuation']}"
        return [f"{examples}{context}{ending}" for context in item["context_options"]]
    without = f"{examples}{str(item['context']).strip()}{delimiter}"
    return [without.strip(), f"{without}{item['continuation']}"]


def _solved(task: Task, item: Item) -> str:
    if task.kind == CHOICES:
        return f"{item['query']}{task.delimiter}{item['choices'][item['gold']]}"
    if task.kind == SCHEMA:
        return f"{item['context_options'][item['gold']]}{task.delimiter}{item['continuation']}"
    return f"{str(item['context']).strip()}{task.delimiter}{item['continuation']}"


def item_rows(task: Task, number: int, coder: "TextCoder", max_length: int) -> list["Row"]:
    """Return the rows to score for an item: one per option, or one for language modeling.

    The scored tokens are those after the prefix shared by all options (multiple choice), the suffix
    shared by all options (schema), or the continuation (language modeling). Rows are truncated to
    their last `max_length` tokens. A row may have no scored token.
    """
    from zerolm.evaluate.likelihood import Row

    texts = prompts(task, number)
    encoded = [[coder.prefix_id, *coder.encode(text, special_tokens=False)] for text in texts]
    if task.kind == SCHEMA:
        common = _common_length([ids[::-1] for ids in encoded])
        scored = [common] * len(encoded)
    else:
        common = _common_length(encoded)
        scored = [len(ids) - common for ids in encoded]
    if task.kind == LANGUAGE_MODELING:
        encoded, scored = encoded[1:], scored[1:]
    rows = []
    for ids, num_scored in zip(encoded, scored, strict=True):
        kept = ids[-max_length:]
        if len(kept) < 2:
            raise ConfigError(f"{task.label}: the prompt of item {number + 1} is empty.")
        rows.append(Row(kept, min(num_scored, len(kept) - 1) if num_scored < len(ids) else 0))
    return rows


def _common_length(sequences: Sequence[list[int]]) -> int:
    """Return the length of the sequences' common prefix."""
    length = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return length


# -------------------------------------------------------------------------------------------------
# Scores


def chunks(tasks: Sequence[Task]) -> Iterator[tuple[int, range]]:
    """Yield (task index, indices of the items to score together)."""
    for number, task in enumerate(tasks):
        for start in range(0, len(task.items), CHUNK_ITEMS):
            yield number, range(start, min(start + CHUNK_ITEMS, len(task.items)))


def is_correct(
    task: Task, number: int, rows: Sequence["Row"], scores: Sequence[tuple[float, bool]]
) -> bool:
    """Return whether an item is answered correctly.

    Args:
        rows: the item's rows, as returned by `item_rows`.
        scores: for each row, its log-likelihood and whether each scored token is the likeliest.
    """
    if task.kind == LANGUAGE_MODELING:
        return scores[0][1] and rows[0].num_scored > 0
    losses = [
        -likelihood / row.num_scored if row.num_scored else math.nan
        for row, (likelihood, _) in zip(rows, scores, strict=True)
    ]
    return losses.index(min(losses)) == task.items[number]["gold"]


def figures(tasks: Sequence[Task], outcomes: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return {`core`: mean centered accuracy, `core/<task>`: centered accuracy on the task}.

    Args:
        outcomes: for each task, whether each item is answered correctly.
    """
    centered = {
        f"core/{task.label}": task.centered(sum(correct) / len(correct))
        for task, correct in zip(tasks, outcomes, strict=True)
    }
    return {"core": sum(centered.values()) / len(centered), **centered}


def to_json(tasks: Sequence[Task], outcomes: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Return each task's accuracy, number of items and list of outcomes by item."""
    return {
        task.label: {
            "accuracy": sum(correct) / len(correct),
            "centered": task.centered(sum(correct) / len(correct)),
            "items": len(correct),
            "correct": [int(each) for each in correct],
        }
        for task, correct in zip(tasks, outcomes, strict=True)
    }
