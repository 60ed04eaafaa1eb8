"""Evaluates an exported model in one process, for `zerolm evaluate`.

Must not depend on a run or an engine, or refer to an evaluation by name.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.config.custom_code import model_problems
from zerolm.config.settings import Settings
from zerolm.distributed.device import inference_device
from zerolm.evaluate import EVALUATIONS
from zerolm.evaluate.held_out import BATCH_TOKENS, open_held_out
from zerolm.evaluate.likelihood import max_batch_tokens
from zerolm.evaluate.runner import ModelRunner
from zerolm.evaluate.text_coder import TextCoder, max_length


def evaluate_export(
    directory: Path,
    settings: Settings,
    *,
    device: str | None = None,
    print_line: Callable[..., None] = print,
) -> dict[str, Any]:
    """Evaluate a model.

    Args:
        directory: contains a model that `from_pretrained` can load, and its tokenizer.
        settings: the evaluations and their settings.

    Returns:
        `model`; `figures`: {`<task>/<metric>`: value}; and for each evaluation with items, their
        outcomes under its name.
    """
    if not (directory / "config.json").is_file():
        fact = "not a model directory" if directory.is_dir() else "no such directory"
        raise ConfigError(f"{directory}: {fact}. Give one that `zerolm export RUN OUT` wrote.")
    if problems := model_problems(directory):
        raise ConfigError(problems)
    wanted = [kind for kind in EVALUATIONS if kind.EXPORT and kind.wanted(settings)]
    if not wanted:
        flags = [kind.EXPORT[0].flag for kind in EVALUATIONS if kind.EXPORT and not kind.requires]
        raise ConfigError(f"nothing to evaluate. Give {', '.join(flags[:-1])} or {flags[-1]}.")
    device = inference_device(device)
    held_out = open_held_out(directory, settings) if settings.val_data else None
    evaluations = [one for kind in wanted for one in kind.build(settings, held_out)]
    for each in evaluations:
        try:
            each.read()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    model = load_directory(directory).to(device).eval()
    coder = TextCoder(directory) if any(each.on_texts for each in evaluations) else None
    for notice in held_out.notices if held_out is not None else ():
        print_line(notice)
    for notice in coder.notices if coder is not None else ():
        print_line(f"note: {notice}")
    runner = ModelRunner(
        model,
        device,
        coder,
        max_length(model.config, coder and coder.tokenizer),
        max_batch_tokens(BATCH_TOKENS, model.config),
    )
    results: dict[str, Any] = {"model": str(directory), "figures": {}}
    for each in evaluations:
        scores = each.measure_export(runner)
        results["figures"] |= scores.figures
        if each.OUTCOMES:
            results[each.name] = scores.file[each.OUTCOMES]
    for key, value in results["figures"].items():
        print_line(f"{key}={value:.6g}")
    return results


def load_directory(directory: Path) -> Any:
    """Load a model in its own precision from a directory, without running code from the directory.

    Raises:
        ConfigError: the model requires its own code, or a file is unreadable or damaged.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if problems := model_problems(directory):
        raise ConfigError(problems)
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, SafetensorError) as error:
        for path in sorted(
            directory.iterdir()
        ):  # safetensors reports an unreadable file as missing
            if not os.access(path, os.R_OK):
                raise ConfigError(f"{path}: Permission denied. Let this user read it.") from None
        raise ConfigError(f"{directory}: cannot be loaded: {error}") from None
