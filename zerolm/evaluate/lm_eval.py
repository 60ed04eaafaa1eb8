"""Runs lm-eval tasks on the model of a run or on an exported model.

lm-eval runs on rank 0: it loads tasks, builds requests and scores the answers. The package is
imported only when used (extra `lm-eval`).
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError, did_you_mean, reason
from zerolm.common.url import hub_client
from zerolm.config.flag import count, flag
from zerolm.engine import replaced
from zerolm.evaluate import olmes
from zerolm.evaluate.evaluation import OWN_TEXTS, TASKS, Evaluation, ExportFlag, Scores
from zerolm.run_dir.metrics import HIGHER, LOWER, Metric, Panel

if TYPE_CHECKING:
    from zerolm.evaluate.held_out import HeldOut
    from zerolm.evaluate.runner import ModelRunner

DEFAULT_NEW_TOKENS = 256  # for tasks that set no limit, as in lm-eval's own models


class LmEval(Evaluation):
    """An entry of `--eval_tasks`; the evaluation has the task's name."""

    setting = "eval_tasks"
    EXPORT = (
        ExportFlag("eval_tasks", "tasks", help="lm-eval tasks to run; may be repeated"),
        ExportFlag("eval_task_path"),
        ExportFlag("eval_task_items"),
    )
    # fmt: off
    METRICS = (
        Metric("eval/<task>/bpb", "bits per byte",
            Panel("Bits per byte of answers", many=True, points=True,
                about="Bits per byte of the tasks' correct answers, given the question."),
            pattern=r"eval/.+/([a-z]+_)?bpb",
            about="tasks in `olmes_easy`: bits per byte of the correct answers; "
                "`eval/olmes_easy/<suite>_bpb` is a suite's mean, and "
                "`eval/olmes_easy/qa_acc` its mean accuracy", better=LOWER),
        Metric("eval/<task>/word_perplexity", "",
            Panel("Perplexity of tasks", many=True, points=True, log=True),
            pattern=r"eval/.+/((word|byte)_)?perplexity(_[\w-]+)?",
            about="`--eval_tasks` that measure perplexity, per word or as `byte_perplexity`",
            better=LOWER),
        Metric("eval/<task>/<metric>", "", TASKS,
            pattern=r"eval/.+/([a-z]+_)?(acc|acc_norm|exact_match|f1|mc1|mc2)(_[\w-]+)?",
            about="result of one of `--eval_tasks`, named as in lm-eval; with a filter other than "
                "`none`, `<metric>_<filter>`. Accuracies share a panel; every other metric has its "
                "own", better=HIGHER),
    )
    # fmt: on

    @dataclass(frozen=True)
    class Flags:
        eval_tasks: tuple[str, ...] = flag(
            "evaluation",
            "list",
            "lm-eval tasks to evaluate on (needs bash launch/setup.sh lm-eval); may be repeated",
            shows="NAME[,NAME]",
            default=(),
            not_with=OWN_TEXTS,
        )
        eval_task_path: str | None = flag(
            "evaluation",
            "text",
            "directory with additional lm-eval task files (yaml)",
            shows="PATH",
        )
        eval_task_items: int | None = count(
            "evaluation", "use only the first N documents of each lm-eval task (default: all)", "N"
        )

    @classmethod
    def check(cls, settings: Any, coder: Any, max_length: int | None) -> None:
        names = task_names(settings)
        if not names:
            raise ConfigError("no task given. Example: --eval_tasks arc_easy,piqa.")
        load_tasks(names, settings.eval_task_path)

    @classmethod
    def label(cls, settings: Any) -> str:
        return ", ".join(task_names(settings))

    @classmethod
    def build(cls, settings: Any, held_out: "HeldOut | None" = None) -> "Sequence[LmEval]":
        return [cls(settings, name) for name in task_names(settings)]

    def __init__(self, settings: Any, name: str):
        super().__init__(settings)
        self.name = name

    def read(self) -> None:
        load_tasks([self.name], self.settings.eval_task_path)

    def _task(self) -> Any:
        return load_tasks([self.name], self.settings.eval_task_path)[self.name]

    def measure(self, runner: Any, step: int = 0) -> Scores:
        with quiet():
            task = self._task()
            return Scores(evaluate(_lm_class()(runner), task, self.settings.eval_task_items))

    def measure_export(self, runner: Any) -> Scores:
        """Use lm-eval's own `hf` model, except for tokenizers of tiktoken, which it cannot load, or
        with a template: it scores an EOS that they append, not the answer's first token.
        """
        from lm_eval.models.huggingface import HFLM

        tokenizer = runner.coder.tokenizer
        if tokenizer is None or runner.coder.has_template:
            model = _lm_class()(runner)
        else:
            model = HFLM(
                pretrained=runner.model, tokenizer=tokenizer, batch_size=8, trust_remote_code=False
            )
        return Scores(evaluate(model, self._task(), self.settings.eval_task_items))

    def shown(self, figures: Mapping[str, float]) -> str:
        own = {key: value for key, value in figures.items() if key.startswith(f"{self.name}/")}
        return super().shown(own or figures)  # a group has only means


def task_names(settings: Any) -> list[str]:
    """Return the task names without duplicates."""
    names = [name.strip() for names in settings.eval_tasks for name in names.split(",")]
    return list(dict.fromkeys(filter(None, names)))


def load_tasks(names: Sequence[str], task_dir: str | None = None) -> dict[str, Any]:
    """Load tasks and their data sets.

    Args:
        names: tasks, groups or tags; `olmes_easy` is the suite in `zerolm.evaluate.olmes`.
        task_dir: directory with YAML files for additional tasks.

    Returns:
        {name: result of lm-eval's `TaskManager.load`}; loaded only once per process.
    """
    others = [name for name in names if name != olmes.NAME]
    known = _manager_for(others, task_dir).all_tasks if others else []
    problems = [
        f"{name}: not an lm-eval task.{did_you_mean(name, known)} List them "
        f"with `lm-eval ls tasks`; --eval_task_path adds a directory with your own."
        for name in others
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return {name: _loaded(name, task_dir) for name in names}


@functools.cache
def _loaded(name: str, task_dir: str | None) -> Any:
    if name == olmes.NAME:
        _require_lm_eval()
        return olmes.load(task_dir)
    try:
        with hub_client(name, "its data may not be on this machine"):
            return _manager_for([name], task_dir).load([name])
    except Exception as error:  # raised by the hub, the network, a YAML file or its functions
        raise ConfigError(
            f"{name}: lm-eval cannot load the task ({reason(error)}). Correct it, or download its "
            f"data on a machine with network access."
        ) from error


def _manager_for(names: Sequence[str], task_dir: str | None) -> Any:
    """Return a task manager that contains these tasks, and lm-eval's own tasks only if needed."""
    if task_dir is not None:
        own = _manager(task_dir, include_defaults=False)
        if set(names) <= set(own.all_subtasks):  # a group may include lm-eval's tasks
            return own
    return _manager(task_dir, include_defaults=True)


@functools.cache
def _manager(task_dir: str | None, include_defaults: bool) -> Any:
    """Return lm-eval's index of tasks. Reading the 10,000 default YAML files takes 20 seconds."""
    if task_dir is not None and not Path(task_dir).is_dir():
        raise ConfigError(f"{task_dir}: no such directory. Give one with lm-eval YAML files.")
    _require_lm_eval()
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=task_dir, include_defaults=include_defaults)


def _require_lm_eval() -> None:
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"needs a package that is not installed ({error}). Run: bash launch/setup.sh lm-eval."
        ) from None


def evaluate(model: Any, task: Any, limit: int | None = None) -> dict[str, float]:
    """Run a loaded task on an lm-eval model.

    Args:
        task: a value returned by `load_tasks`; can be run repeatedly.
        limit: maximum number of documents per task; None: all.

    Returns:
        {`<task>/<metric>`: value} for every task and group.
    """
    import lm_eval

    output = lm_eval.evaluate(
        lm=model, task_dict=task, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return olmes.with_averages(flatten_results(output["results"]))


def flatten_results(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return lm-eval's results without standard errors: {`<task>/<metric>[_<filter>]`: value}."""
    row = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and filter_name and not metric.endswith("_stderr"):
                suffix = "" if filter_name == "none" else f"_{filter_name}"
                row[f"{task}/{metric}{suffix}"] = float(value)
    return row


def _lm_class() -> Any:
    """Return the class of the model that lm-eval evaluates. The class is defined inside a function,
    because importing its base class takes seconds.
    """
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    from zerolm.evaluate.likelihood import Row, row_problem
    from zerolm.evaluate.sampling import Prompt, SamplingOptions

    class EngineLM(TemplateLM):
        """Computes on all ranks, but appears to lm-eval as a single process."""

        def __init__(self, runner: "ModelRunner"):
            super().__init__()
            self.runner, self.coder = runner, runner.coder
            self.tokenizer = runner.coder.tokenizer

        @property
        def eot_token_id(self) -> int:
            return self.coder.eos_id

        @property
        def prefix_token_id(self) -> int:
            return self.coder.prefix_id

        def tok_encode(self, string: str, add_special_tokens: Any = None, **_: Any) -> list[int]:
            return self.coder.encode(string, add_special_tokens)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            rows = [Row(context + scored, len(scored)) for _, context, scored in requests]
            for (texts, *_), row in zip(requests, rows, strict=True):
                problem = row_problem(row, self.runner.max_length)
                assert problem is None, f"{str(texts)[:100]} {problem}"
            return self.runner.score(rows)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            rows, counts = [], []
            for (text,) in (request.args for request in requests):
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.runner.max_length,
                    context_len=1,
                )
                pairs = list(map(utils.make_disjoint_window, windows))
                rows += [Row(context + scored, len(scored)) for context, scored in pairs]
                counts.append(len(pairs))
            scores = iter(self.runner.score(rows))
            return [sum(next(scores)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            prompts = []
            for number, (context, given) in enumerate(request.args for request in requests):
                options = normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS)
                new_tokens, max_length = options["max_gen_toks"], self.runner.max_length
                room = max_length - new_tokens
                assert room > 0, f"{new_tokens} new tokens do not fit into {max_length} positions"
                stops = options.get("until") or []
                sampling = SamplingOptions(
                    float(options.get("temperature") or 0),
                    int(options.get("top_k") or 0),
                    float(options.get("top_p") or 1),
                )
                ids = self.tok_encode(context)[-room:] or [self.prefix_token_id]
                stops = [stops] if isinstance(stops, str) else list(stops)
                prompts.append((Prompt(ids, new_tokens, sampling, seed=number), stops))
            return self.runner.generate(prompts)

    return EngineLM


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress lm-eval's progress bars and warnings, but no other output."""
    import logging

    from tqdm import tqdm

    logger = logging.getLogger("lm_eval")
    level, silent = logger.level, functools.partialmethod(tqdm.__init__, disable=True)
    logger.setLevel(logging.ERROR)
    try:
        # Some of lm-eval's progress bars cannot be disabled by an option.
        with replaced.installed(tqdm, "__init__", silent):
            yield
    finally:
        logger.setLevel(level)
