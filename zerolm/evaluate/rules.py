"""Checks the settings of evaluations and samples before a run starts.

Reads the items, prompts, tasks and the tokenizer; changes nothing. Only rank 0 reads inputs that
only rank 0 uses. Slow imports are inside the functions that need them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError
from zerolm.config.settings import Settings
from zerolm.evaluate import core, hellaswag
from zerolm.shards.reader import Source

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zerolm.evaluate.text_coder import TextCoder

REQUIRES = {  # setting: it has an effect only with one of these
    "needle_items": ("val_data",),
    "loss_by_position": ("val_data",),
    "hellaswag_items": ("hellaswag",),
    "core_items": ("core",),
    "eval_task_path": ("eval_tasks",),
    "eval_task_items": ("eval_tasks",),
    "downstream_interval": ("hellaswag", "core", "eval_tasks"),
    "sample_interval": ("prompts",),
    "sample_length": ("prompts",),
    "temperature": ("prompts",),
    "top_k": ("prompts",),
    "top_p": ("prompts",),
}
MIN_NEEDLE_TEXT = 32  # tokens of a window with a needle
DEFAULTS = {name: field.default for name, field in Settings.__dataclass_fields__.items()}


def task_names(settings: Settings) -> list[str]:
    """Return the names of the lm-eval tasks, without duplicates."""
    names = [name.strip() for names in settings.eval_tasks for name in names.split(",")]
    return list(dict.fromkeys(filter(None, names)))


def tokenizer_dir(sources: Sequence[Source]) -> Path:
    """Return the directory of the tokenizer of the training data."""
    return sources[0].tokenizer_directory()


def max_text_tokens(settings: Settings, model_config: "PretrainedConfig", tokenizer: Any) -> int:
    """Return the maximum tokens of a text in a forward pass during a run.

    At most a training sequence: the model has learned no positions beyond it, and training may
    leave no memory for more. `settings` are resolved as far as possible.
    """
    from zerolm.evaluate.text_coder import max_length

    positions = max_length(model_config, tokenizer)
    return positions if settings.seq_len is None else min(positions, settings.seq_len)


def problems(settings: Settings) -> list[str]:
    """Return the problems of the settings themselves, one line each."""
    found = []
    for name, required in REQUIRES.items():
        changed = name in settings.explicit and getattr(settings, name) != DEFAULTS[name]
        if changed and not any(getattr(settings, each) for each in required):
            flags = " or ".join(f"--{each}" for each in required)
            found.append(
                f"{settings.where(name)}: {getattr(settings, name)} needs {flags}. Add it, or "
                f"remove this setting."
            )
    if settings.needle_items and (settings.seq_len or MIN_NEEDLE_TEXT) < MIN_NEEDLE_TEXT:
        found.append(
            f"{settings.where('needle_items')}: {settings.needle_items} needs --seq_len "
            f"{MIN_NEEDLE_TEXT} or more: a needle has 16 tokens. Raise it, or remove this setting."
        )
    return found


def input_problems(
    settings: Settings,
    sources: Sequence[Source],
    model_config: "PretrainedConfig | None",
    environment: Mapping[str, str],
) -> list[str]:
    """Return the problems of the files, tasks and tokenizer that the settings name, one line each.

    The caller refuses only a new run for these. A resumed run continues without the evaluation: a
    file may have moved since, or a hub may be down.

    Args:
        sources: training sources; empty if none could be opened.
        model_config: None if it could not be read.
        environment: the launcher's variables.
    """
    found: list[str] = []
    names = ("hellaswag", "core", "eval_tasks", "prompts")
    requested = [name for name in names if getattr(settings, name)]
    if not requested or not sources:
        return found
    try:
        from zerolm.evaluate.text_coder import TextCoder

        coder = TextCoder(tokenizer_dir(sources), sources[0].eos_id)
    except ConfigError as error:
        where = settings.where(requested[0])
        return found + [f"{where}: needs a tokenizer: {problem}" for problem in error.problems]
    if environment.get("RANK", "0") != "0":
        return found
    checks: dict[str, Callable[[], object]] = {
        "hellaswag": lambda: _check_hellaswag(settings, coder, model_config),
        "core": lambda: core.read_bundle(settings.core or "", settings.core_items),
        "eval_tasks": lambda: _load_tasks(settings),
        "prompts": lambda: _check_prompts(settings, coder, model_config),
    }
    for name in requested:
        try:
            checks[name]()
        except ConfigError as error:
            found += [f"{settings.where(name)}: {problem}" for problem in error.problems]
    return found


def _check_hellaswag(
    settings: Settings, coder: "TextCoder", model_config: "PretrainedConfig | None"
) -> None:
    name = settings.hellaswag or ""
    items = hellaswag.read_items(name, settings.hellaswag_items)
    if model_config is None:
        return
    try:
        max_tokens = max_text_tokens(settings, model_config, coder.tokenizer)
        coder.rows([item.requests for item in items], max_tokens)
    except ConfigError as error:
        raise ConfigError([f"{name}: {problem}" for problem in error.problems]) from None


def _load_tasks(settings: Settings) -> None:
    from zerolm.evaluate.lm_eval import load_tasks

    names = task_names(settings)
    if not names:
        raise ConfigError("no task is named. Example: --eval_tasks arc_easy,piqa.")
    load_tasks(names, settings.eval_task_path)


def _check_prompts(
    settings: Settings, coder: "TextCoder", model_config: "PretrainedConfig | None"
) -> None:
    from zerolm.evaluate.sampling import read_prompts
    from zerolm.evaluate.text_coder import prompt_ids

    path = Path(settings.prompts or "")
    prompts = read_prompts(path)
    if model_config is None:
        return
    max_tokens = max_text_tokens(settings, model_config, coder.tokenizer)
    for number, prompt in enumerate(prompts, 1):
        tokens = len(prompt_ids(coder, prompt))
        if tokens + settings.sample_length > max_tokens:
            raise ConfigError(
                f"{path}: prompt {number} has {tokens} tokens; with --sample_length "
                f"{settings.sample_length} they must not exceed {max_tokens}, the maximum of "
                f"--seq_len and the model. Shorten one of them."
            )


def summary_lines(settings: Settings) -> dict[str, str]:
    """Return {name: line} that describe the evaluations and the samples, if there are any."""
    lines = {}
    names = [f"HellaSwag ({settings.hellaswag_items or 'all'} items)"] if settings.hellaswag else []
    if settings.core:
        names.append(f"CORE ({settings.core_items or 'all'} items of each task)")
    names += task_names(settings)
    if names:
        lines["downstream"] = f"{', '.join(names)} every {settings.downstream_interval} steps"
    if settings.prompts:
        when = (
            f"every {settings.sample_interval:,} tokens"
            if settings.sample_interval
            else ("after each doubling of the tokens")
        )
        lines["samples"] = f"of {settings.prompts}, {when}"
    return lines
