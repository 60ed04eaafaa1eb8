"""lm-eval's tasks on a DeepSpeed engine: the first rank asks, all ranks compute.

The first rank alone runs lm-eval: it loads tasks, builds requests and scores them, and whatever
goes wrong there is its own affair. For each list of requests it sends every rank the token ids, and
all compute them in lock step. The other ranks wait in `serve` for the next list, or for the end,
however long lm-eval takes (patience.py).

lm-eval (the extra `lm-eval`) is imported by need only. Knows no run and no training.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.distributed.collectives import broadcast_object
from zerolm.evaluate.keepalive import Patience, hear
from zerolm.evaluate.likelihood import ALONE, Ranks, Row, log_likelihoods, problem_of
from zerolm.evaluate.sampling import Choice, Prompt, generate
from zerolm.evaluate.text_coder import TextCoder

MAX_NEW_TOKENS = 256  # of tasks that do not say, as in lm-eval's own models


class ForwardError(Exception):
    """A forward pass failed on this rank: the other ranks may be in it, and wait."""


class Compute(NamedTuple):
    """A model and how it is run on: everything but what to compute."""

    model: Any
    coder: TextCoder
    device: Any
    max_length: int  # tokens of a text at once
    batch_tokens: int
    ranks: Ranks = ALONE
    beat: Callable[[], None] = lambda: None

    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the likeliest) of each row. Every rank calls."""
        sums, likeliest = log_likelihoods(
            self.model,
            rows,
            device=self.device,
            batch_tokens=self.batch_tokens,
            max_length=self.max_length,
            ranks=self.ranks,
            beat=self.beat,
        )
        return list(zip(sums.tolist(), likeliest.tolist(), strict=True))

    def write(self, prompts: Sequence[tuple[Prompt, list[str]]]) -> list[str]:
        """Return the text that follows each prompt, up to its stop texts. Every rank calls."""
        texts: list[str] = [""] * len(prompts)
        wanted = [tuple(filter(None, stops)) for _, stops in prompts]
        for stops in dict.fromkeys(wanted):
            numbers = [number for number, ends in enumerate(wanted) if ends == stops]

            def stop(ids: Sequence[int], stops: tuple[str, ...] = stops) -> bool:
                if ids[-1] == self.coder.eos_id or not stops:
                    return ids[-1] == self.coder.eos_id
                text = self.coder.decode(ids, special_tokens=False)
                return any(end in text for end in stops)

            found = generate(
                self.model, [prompts[n][0] for n in numbers], stop,
                device=self.device, ranks=self.ranks, beat=self.beat,
            )  # fmt: skip
            for number, ids in zip(numbers, found, strict=True):
                text = self.coder.decode(ids, special_tokens=False)
                for end in stops:
                    text = text.split(end)[0]
                texts[number] = text
        return texts


def load_tasks(names: Sequence[str], task_dir: str | None = None) -> dict[str, Any]:
    """Load tasks and their data sets.

    Args:
        names: of tasks, groups or tags.
        task_dir: with yaml files of further tasks.

    Returns:
        For each name what lm-eval's TaskManager loads; once in a process, however often it is
        asked for.

    Raises:
        ConfigError: lm-eval is not installed, does not know a name, or cannot load a task.
    """
    manager = _manager(task_dir)
    problems = [
        f"{name}: lm-eval knows no such task.{did_you_mean(name, manager.all_tasks)} List them "
        f"with lm-eval ls tasks; --eval_task_path adds a directory of your own."
        for name in names
        if name not in manager.all_tasks
    ]
    if problems:
        raise ConfigError(problems)
    return {name: _loaded(name, task_dir) for name in names}


@functools.cache
def _loaded(name: str, task_dir: str | None) -> Any:
    try:
        return _manager(task_dir).load([name])
    except Exception as error:  # the hub, the network, a yaml file, its functions: whatever
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{name}: lm-eval cannot load it ({reason}). Correct the task, or load its data where "
            f"there is a network."
        ) from error


@functools.cache  # it reads 10,000 yaml files
def _manager(task_dir: str | None) -> Any:
    if task_dir is not None and not Path(task_dir).is_dir():
        raise ConfigError(f"{task_dir}: no such directory. Name one with lm-eval's yaml files.")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"needs a package that is not installed ({error}). pip install 'zerolm[lm-eval]'."
        ) from None
    return TaskManager(include_path=task_dir)


def evaluate(
    compute: Compute, tasks: Any, limit: int | None = None, patience: Patience | None = None
) -> dict[str, float]:
    """Run a loaded task. Where there are ranks the first one calls, and the others `serve`.

    Args:
        tasks: one of `load_tasks`; may be run again.
        limit: documents of each; None for all.
        patience: that of `served`; None for a process on its own.

    Returns:
        `<task>/<metric>` of every task and group.

    Raises:
        ForwardError: in a forward pass. After any other error every rank can go on.
    """
    import lm_eval

    model = _lm_class()(compute, patience)
    found = lm_eval.evaluate(
        lm=model, task_dict=tasks, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return figures(found["results"])


def evaluate_directory(
    model: Any, directory: Path, tasks: Mapping[str, Any], limit: int | None = None
) -> dict[str, float]:
    """Run loaded tasks on an exported model, in one process, with lm-eval's own `hf` model.

    Args:
        model: loaded from `directory`.

    Returns:
        `<task>/<metric>` of every task and group.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=model, tokenizer=str(directory), batch_size=8)
    row: dict[str, float] = {}
    for task in tasks.values():
        found = lm_eval.evaluate(
            lm=theirs, task_dict=task, limit=limit, bootstrap_iters=0, log_samples=False
        )
        row |= figures(found["results"])
    return row


def figures(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return lm-eval's results as `<task>/<metric>`; a filter's name follows a metric's."""
    row = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and kind and not metric.endswith("_stderr"):
                row[f"{task}/{metric}" + ("" if kind == "none" else f"_{kind}")] = float(value)
    return row


@contextlib.contextmanager
def served(compute: Compute) -> Iterator[Patience]:
    """Let the other ranks wait, and return from `serve` at the end. The first rank calls."""
    try:
        with patience(compute) as patient:
            yield patient
    except ForwardError:
        raise  # the others are not waiting there
    except BaseException:
        _release(compute)
        raise
    _release(compute)


def patience(compute: Compute) -> Patience:
    """Return the context in which the first rank may take its time, while the others wait."""
    return Patience(compute.beat, compute.ranks.world_size > 1, compute.device)


def _release(compute: Compute) -> None:
    if compute.ranks.world_size > 1:
        broadcast_object(None)


def serve(compute: Compute) -> None:
    """Compute what the first rank asks for, until it has no more. Every other rank calls."""
    while (asked := hear(compute.beat)) is not None:
        kind, requests = asked
        getattr(compute, kind)(requests)


def _lm_class() -> Any:
    """Return the class, whose base is lm-eval's own."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class EngineLM(TemplateLM):
        """A model of lm-eval's that is one process to it, and all ranks in truth."""

        def __init__(self, compute: Compute, patience: Patience | None):
            super().__init__()
            self.patience = patience
            self.compute, self.coder = compute, compute.coder
            self.tokenizer = compute.coder.tokenizer

        @property
        def eot_token_id(self) -> int:
            return self.coder.eos_id

        @property
        def prefix_token_id(self) -> int:
            return self.coder.prefix_id

        def tok_encode(self, string: str, add_special_tokens: Any = None, **_: Any) -> list[int]:
            return self.coder.encode(string, add_special_tokens)

        def _ask(self, kind: str, requests: list[Any]) -> list[Any]:
            if not requests:
                return []
            try:
                with contextlib.nullcontext() if self.patience is None else self.patience.paused():
                    if self.compute.ranks.world_size > 1:
                        broadcast_object((kind, requests))
                    return getattr(self.compute, kind)(requests)
            except Exception as error:
                raise ForwardError(f"{type(error).__name__}: {error}") from error

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            rows = [Row(context + scored, len(scored)) for _, context, scored in requests]
            for (texts, *_), row in zip(requests, rows, strict=True):
                problem = problem_of(row, self.compute.max_length)
                assert problem is None, f"{str(texts)[:100]} {problem}"
            return self._ask("score", rows)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            rows, counts = [], []
            for (text,) in (request.args for request in requests):
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.compute.max_length,
                    context_len=1,
                )
                pairs = list(map(utils.make_disjoint_window, windows))
                rows += [Row(context + scored, len(scored)) for context, scored in pairs]
                counts.append(len(pairs))
            scores = iter(self._ask("score", rows))
            return [sum(next(scores)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            prompts = []
            for number, (context, given) in enumerate(request.args for request in requests):
                asked = normalize_gen_kwargs(given, MAX_NEW_TOKENS)
                most = asked["max_gen_toks"]
                room = self.compute.max_length - most
                assert room > 0, f"{most} new tokens, of at most {self.compute.max_length} in all"
                stops = asked.get("until") or []
                choice = Choice(
                    float(asked.get("temperature") or 0),
                    int(asked.get("top_k") or 0),
                    float(asked.get("top_p") or 1),
                )
                ids = self.tok_encode(context)[-room:] or [self.prefix_token_id]
                stops = [stops] if isinstance(stops, str) else list(stops)
                prompts.append((Prompt(ids, most, choice, seed=number), stops))
            return self._ask("write", prompts)

    return EngineLM


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval's progress bars and warnings out of a run's log, and nothing else."""
    import logging

    from tqdm import tqdm

    logger = logging.getLogger("lm_eval")
    level, init = logger.level, tqdm.__init__
    logger.setLevel(logging.ERROR)
    # lm-eval makes bars that no argument of its own switches off.
    tqdm.__init__ = functools.partialmethod(init, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        tqdm.__init__ = init
