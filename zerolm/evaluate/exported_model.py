"""Evaluate an exported model directory: HellaSwag, and lm-eval's tasks with lm-eval's own model.

What `python -m zerolm evaluate` does. One process; knows no run and no engine.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.evaluate import hellaswag, lm_eval
from zerolm.evaluate.likelihood import fitting_tokens
from zerolm.evaluate.text_coder import TextCoder, max_length

BATCH_TOKENS = 8192  # of a forward pass, or fewer


def evaluate_export(
    directory: Path,
    *,
    tasks: Sequence[str] = (),
    task_path: str | None = None,
    task_items: int | None = None,
    hellaswag_name: str | None = None,
    hellaswag_items: int = 0,
    device: str | None = None,
    say: Callable[..., None] = print,
) -> dict[str, Any]:
    """Return `<task>/<metric>` figures of a model, and what became of each item of HellaSwag.

    Args:
        directory: that `from_pretrained` loads, with its tokenizer.
        task_path: directory with further tasks.
        task_items, hellaswag_items: the first so many; None and 0 for all.
        device: of torch; None for a GPU if there is one.

    Raises:
        ConfigError: no such model, tokenizer, task or file.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory}: is no model. Name what zerolm export wrote.")
    if not tasks and not hellaswag_name:
        raise ConfigError("nothing to evaluate: give --tasks, --hellaswag, or both.")
    items = hellaswag.read_items(hellaswag_name, hellaswag_items) if hellaswag_name else []
    loaded = lm_eval.load_tasks(tasks, task_path) if tasks else None
    import torch
    from transformers import AutoModelForCausalLM

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    model = model.to(device).eval()
    found: dict[str, Any] = {"model": str(directory), "figures": {}}
    coder = TextCoder(directory)
    compute = lm_eval.Compute(
        model,
        coder,
        device,
        max_length(model.config, coder.tokenizer),
        fitting_tokens(BATCH_TOKENS, model.config),
    )
    if items:
        asked = [item.requests for item in items]
        likelihoods = iter(x for x, _ in compute.score(coder.rows(asked, compute.max_length)))
        outcomes = [
            hellaswag.outcome(item, [next(likelihoods) for _ in item.endings]) for item in items
        ]
        figures = hellaswag.accuracies(outcomes)
        found["figures"] |= {f"hellaswag/{key}": value for key, value in figures.items()}
        found["hellaswag"] = [hellaswag.to_json(outcome) for outcome in outcomes]
    if loaded is not None and coder.tokenizer is not None:
        found["figures"] |= lm_eval.evaluate_directory(model, directory, loaded, task_items)
    elif loaded is not None:  # a tokenizer of tiktoken, which lm-eval's own model cannot load
        for task in loaded.values():
            found["figures"] |= lm_eval.evaluate(compute, task, task_items)
    for key, value in found["figures"].items():
        say(f"{key}={value:.6g}")
    return found
