"""Evaluates an exported model: loss, HellaSwag, CORE, and tasks with lm-eval's own `hf` model.

Used by `zerolm evaluate`, in one process. Must not depend on a run or an engine.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.config.custom_code import model_problems
from zerolm.distributed.device import inference_device
from zerolm.evaluate import core, hellaswag, lm_eval
from zerolm.evaluate.exported_loss import (
    BATCH_TOKENS,
    HeldOut,
    held_out_figures,
    open_held_out,
)
from zerolm.evaluate.likelihood import max_batch_tokens
from zerolm.evaluate.text_coder import TextCoder, max_length


def evaluate_export(
    directory: Path,
    *,
    tasks: Sequence[str] = (),
    task_path: str | None = None,
    task_items: int | None = None,
    hellaswag_name: str | None = None,
    hellaswag_items: int = 0,
    held_out: HeldOut | None = None,
    core_directory: str | None = None,
    core_items: int = 0,
    device: str | None = None,
    print_line: Callable[..., None] = print,
) -> dict[str, Any]:
    """Evaluate a model; return {`model`, `figures`, `hellaswag`, `core`}.

    Args:
        directory: a model that `from_pretrained` loads, and its tokenizer.
        task_path: directory with further tasks.
        task_items: maximum documents per task; None for all.
        hellaswag_name: file or hub id of HellaSwag; None to leave it out.
        hellaswag_items: maximum items; 0 for all.
        held_out: token shards to compute loss and bits per byte on.
        core_directory: bundle of CORE; None to leave it out.
        core_items: maximum items per task of CORE; 0 for all.

    Returns:
        `figures` is {`<task>/<metric>`: value}; `hellaswag` and `core`, if evaluated, have the
        outcome of each item.
    """
    if not (directory / "config.json").is_file():
        fact = "not a model directory" if directory.is_dir() else "no such directory"
        raise ConfigError(f"{directory}: {fact}. Give one that `zerolm export RUN OUT` wrote.")
    if problems := model_problems(directory):
        raise ConfigError(problems)
    if not (tasks or hellaswag_name or held_out or core_directory):
        raise ConfigError("nothing to evaluate. Give --val_data, --tasks, --hellaswag or --core.")
    device = inference_device(device)
    sources, held_out = (None, None) if held_out is None else open_held_out(directory, held_out)
    core_tasks = core.read_bundle(core_directory, core_items) if core_directory else []
    items = hellaswag.read_items(hellaswag_name, hellaswag_items) if hellaswag_name else []
    loaded = lm_eval.load_tasks(tasks, task_path) if tasks else None
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", local_files_only=True, trust_remote_code=False
    )
    model = model.to(device).eval()
    results: dict[str, Any] = {"model": str(directory), "figures": {}}
    if sources is not None and held_out is not None:
        results["figures"] |= held_out_figures(model, sources, held_out, print_line)
    if items or core_tasks or loaded is not None:
        coder = TextCoder(directory)
        for notice in coder.notices:
            print_line(f"note: {notice}")
        runner = lm_eval.ModelRunner(
            model,
            coder,
            device,
            max_length(model.config, coder.tokenizer),
            max_batch_tokens(BATCH_TOKENS, model.config),
        )
        _evaluate_texts(results, runner, items, core_tasks)
    if loaded is not None and coder.tokenizer is not None:
        results["figures"] |= lm_eval.evaluate_directory(model, coder.tokenizer, loaded, task_items)
    elif loaded is not None:  # lm-eval's own model cannot load a tiktoken tokenizer
        for task in loaded.values():
            results["figures"] |= lm_eval.evaluate(runner, task, task_items)
    for key, value in results["figures"].items():
        print_line(f"{key}={value:.6g}")
    return results


def _evaluate_texts(
    results: dict[str, Any],
    runner: lm_eval.ModelRunner,
    items: Sequence[hellaswag.Item],
    core_tasks: Sequence[core.Task],
) -> None:
    """Add HellaSwag and CORE to the results."""
    if items:
        requests = [item.requests for item in items]
        rows = runner.coder.rows(requests, runner.max_length)
        likelihoods = iter(x for x, _ in runner.score(rows))
        outcomes = [
            hellaswag.outcome(item, [next(likelihoods) for _ in item.endings]) for item in items
        ]
        accuracies = hellaswag.accuracies(outcomes)
        results["figures"] |= {f"hellaswag/{key}": value for key, value in accuracies.items()}
        results["hellaswag"] = [hellaswag.to_json(outcome) for outcome in outcomes]
    if core_tasks:
        correct: list[list[bool]] = [[] for _ in core_tasks]
        for number, numbers in core.chunks(core_tasks):
            task = core_tasks[number]
            rows_of = [core.item_rows(task, n, runner.coder, runner.max_length) for n in numbers]
            scores = iter(runner.score([row for rows in rows_of for row in rows]))
            correct[number] += [
                core.is_correct(task, n, rows, [next(scores) for _ in rows])
                for n, rows in zip(numbers, rows_of, strict=True)
            ]
        results["figures"] |= core.figures(core_tasks, correct)
        results["core"] = core.to_json(core_tasks, correct)
