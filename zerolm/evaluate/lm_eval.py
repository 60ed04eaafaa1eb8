"""Tasks of lm-eval on a DeepSpeed engine: rank 0 runs lm-eval, all ranks compute.

Rank 0 loads tasks, builds requests and scores the answers, so an error of lm-eval concerns no other
rank. For each list of requests it sends the token ids to all ranks, which compute in lock step. The
other ranks wait in `serve`; `KeepAlive` keeps them waiting however long lm-eval takes.

lm-eval (the extra `lm-eval`) is imported only when used. Must not depend on the training loop.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.common.errors import ConfigError, did_you_mean, reason
from zerolm.distributed.collectives import broadcast_object
from zerolm.evaluate import olmes
from zerolm.evaluate.keepalive import KeepAlive, receive
from zerolm.evaluate.likelihood import (
    SINGLE_PROCESS,
    Ranks,
    Row,
    log_likelihoods,
    row_problem,
)
from zerolm.evaluate.sampling import Prompt, SamplingOptions, generate
from zerolm.evaluate.text_coder import TextCoder

DEFAULT_NEW_TOKENS = 256  # of a task that sets no limit, as in lm-eval's own models


class ForwardError(Exception):
    """A forward pass failed on this rank while the other ranks may be waiting inside it."""


class ModelRunner(NamedTuple):
    """A model, its tokenizer, and the limits of its forward passes."""

    model: Any
    coder: TextCoder
    device: Any
    max_length: int  # tokens of a text in one forward pass
    batch_tokens: int
    ranks: Ranks = SINGLE_PROCESS
    tick: Callable[[], None] = lambda: None

    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the likeliest) per row. All ranks call this."""
        sums, likeliest = log_likelihoods(
            self.model,
            rows,
            device=self.device,
            batch_tokens=self.batch_tokens,
            max_length=self.max_length,
            ranks=self.ranks,
            tick=self.tick,
        )
        return list(zip(sums.tolist(), likeliest.tolist(), strict=True))

    def generate(self, prompts: Sequence[tuple[Prompt, list[str]]]) -> list[str]:
        """Return the text that continues each prompt, up to its stop strings. All ranks call this.

        Args:
            prompts: (prompt, stop strings).
        """
        texts: list[str] = [""] * len(prompts)
        stops_of = [tuple(filter(None, stops)) for _, stops in prompts]
        for stops in dict.fromkeys(stops_of):
            numbers = [number for number, each in enumerate(stops_of) if each == stops]

            def stop(ids: Sequence[int], stops: tuple[str, ...] = stops) -> bool:
                if ids[-1] == self.coder.eos_id or not stops:
                    return ids[-1] == self.coder.eos_id
                text = self.coder.decode(ids, special_tokens=False)
                return any(end in text for end in stops)

            generated = generate(
                self.model, [prompts[n][0] for n in numbers], stop,
                device=self.device, ranks=self.ranks, tick=self.tick,
            )  # fmt: skip
            for number, ids in zip(numbers, generated, strict=True):
                text = self.coder.decode(ids, special_tokens=False)
                for end in stops:
                    text = text.split(end)[0]
                texts[number] = text
        return texts


def load_tasks(names: Sequence[str], task_dir: str | None = None) -> dict[str, Any]:
    """Load tasks and their data sets.

    Args:
        names: tasks, groups or tags; `olmes_easy` is the suite of `zerolm.evaluate.olmes`.
        task_dir: YAML files of further tasks.

    Returns:
        {name: value of lm-eval's `TaskManager.load`}; loaded only once per process.
    """
    others = [name for name in names if name != olmes.NAME]
    known = _manager_for(others, task_dir).all_tasks if others else []
    problems = [
        f"{name}: not a task of lm-eval.{did_you_mean(name, known)} List them "
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
        return _manager_for([name], task_dir).load([name])
    except Exception as error:  # from the hub, the network, a YAML file or its functions
        raise ConfigError(
            f"{name}: lm-eval cannot load the task ({reason(error)}). Correct it, or download its "
            f"data on a machine with a network."
        ) from error


def _manager_for(names: Sequence[str], task_dir: str | None) -> Any:
    """Return one that knows these tasks, which a directory of the user's own may suffice for."""
    if task_dir is not None:
        own = _manager(task_dir, include_defaults=False)
        if set(names) <= set(own.all_subtasks):  # a group may have tasks of lm-eval
            return own
    return _manager(task_dir, include_defaults=True)


@functools.cache
def _manager(task_dir: str | None, include_defaults: bool) -> Any:
    """Return lm-eval's index of tasks; the defaults are 10,000 YAML files, read in 20 seconds."""
    if task_dir is not None and not Path(task_dir).is_dir():
        raise ConfigError(f"{task_dir}: no such directory. Give one with YAML files of lm-eval.")
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


def evaluate(
    runner: ModelRunner,
    task: Any,
    limit: int | None = None,
    keep_alive: KeepAlive | None = None,
) -> dict[str, float]:
    """Run a loaded task. Rank 0 calls this while the other ranks are in `serve`.

    Args:
        task: a value of `load_tasks`; may be run again.
        limit: maximum documents per task; None for all.
        keep_alive: see `serving_peers`; None in a single process.

    Returns:
        {`<task>/<metric>`: value} of every task and group.

    Raises:
        ForwardError: a forward pass failed. After any other error every rank can continue.
    """
    import lm_eval

    model = _lm_class()(runner, keep_alive)
    output = lm_eval.evaluate(
        lm=model, task_dict=task, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return olmes.with_averages(flatten_results(output["results"]))


def evaluate_directory(
    model: Any, tokenizer: Any, tasks: Mapping[str, Any], limit: int | None = None
) -> dict[str, float]:
    """Run loaded tasks on an exported model in one process, with lm-eval's own `hf` model.

    Args:
        limit: maximum documents per task; None for all.

    Returns:
        {`<task>/<metric>`: value} of every task and group.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    hf_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, trust_remote_code=False)
    row: dict[str, float] = {}
    for task in tasks.values():
        output = lm_eval.evaluate(
            lm=hf_model, task_dict=task, limit=limit, bootstrap_iters=0, log_samples=False
        )
        row |= olmes.with_averages(flatten_results(output["results"]))
    return row


def flatten_results(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return lm-eval's results as {`<task>/<metric>[_<filter>]`: value}, without their errors."""
    row = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and filter_name and not metric.endswith("_stderr"):
                suffix = "" if filter_name == "none" else f"_{filter_name}"
                row[f"{task}/{metric}{suffix}"] = float(value)
    return row


@contextlib.contextmanager
def serving_peers(runner: ModelRunner) -> Iterator[KeepAlive]:
    """Keep the other ranks in `serve`, and let them return at the end. Rank 0 calls."""
    try:
        with keep_alive(runner) as alive:
            yield alive
    except ForwardError:
        raise  # the other ranks are not in `serve`
    except BaseException:
        _release_peers(runner)
        raise
    _release_peers(runner)


def keep_alive(runner: ModelRunner) -> KeepAlive:
    """Return the context in which rank 0 may work for long while the other ranks wait."""
    return KeepAlive(runner.tick, runner.ranks.world_size > 1, runner.device)


def _release_peers(runner: ModelRunner) -> None:
    if runner.ranks.world_size > 1:
        broadcast_object(None)


def serve(runner: ModelRunner) -> None:
    """Compute what rank 0 requests, until it sends None. All ranks but rank 0 call this."""
    while (message := receive(runner.tick)) is not None:
        method, requests = message
        getattr(runner, method)(requests)


def _lm_class() -> Any:
    """Return the model class for lm-eval; a function, because importing the base takes seconds."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class EngineLM(TemplateLM):
        """Looks like a single process to lm-eval, and computes on all ranks."""

        def __init__(self, runner: ModelRunner, keep_alive: KeepAlive | None):
            super().__init__()
            self.keep_alive = keep_alive
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

        def _compute(self, method: str, requests: list[Any]) -> list[Any]:
            """Call a method of `ModelRunner` on all ranks."""
            if not requests:
                return []
            alive = self.keep_alive
            try:
                with contextlib.nullcontext() if alive is None else alive.paused():
                    if self.runner.ranks.world_size > 1:
                        broadcast_object((method, requests))
                    return getattr(self.runner, method)(requests)
            except Exception as error:
                raise ForwardError(f"{type(error).__name__}: {error}") from error

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            rows = [Row(context + scored, len(scored)) for _, context, scored in requests]
            for (texts, *_), row in zip(requests, rows, strict=True):
                problem = row_problem(row, self.runner.max_length)
                assert problem is None, f"{str(texts)[:100]} {problem}"
            return self._compute("score", rows)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            rows, counts = [], []
            for (text,) in (request.args for request in requests):
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.runner.max_length,
                    context_len=1,
                )
                pairs = list(map(utils.make_disjoint_window, windows))
                rows += [Row(context + scored, len(scored)) for context, scored in pairs]
                counts.append(len(pairs))
            scores = iter(self._compute("score", rows))
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
            return self._compute("generate", prompts)

    return EngineLM


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress lm-eval's progress bars and warnings, and no other output."""
    import logging

    from tqdm import tqdm

    logger = logging.getLogger("lm_eval")
    level, init = logger.level, tqdm.__init__
    logger.setLevel(logging.ERROR)
    # Some of lm-eval's progress bars have no option to disable them.
    tqdm.__init__ = functools.partialmethod(init, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        tqdm.__init__ = init
