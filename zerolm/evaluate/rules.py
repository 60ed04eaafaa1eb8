"""What the settings of evaluations and samples must be, looked at before a run begins.

Reads the items, prompts, tasks and the tokenizer; changes nothing. What is only used by the first
rank is only read by it. Whatever takes long to import waits until a setting needs it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError
from zerolm.config.settings import Settings
from zerolm.evaluate import hellaswag
from zerolm.shards.reader import Source

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zerolm.evaluate.text_coder import TextCoder

NEEDED = {  # what a setting is about
    "hellaswag_items": ("hellaswag",),
    "eval_task_path": ("eval_tasks",),
    "eval_task_items": ("eval_tasks",),
    "downstream_interval": ("hellaswag", "eval_tasks"),
    "sample_interval": ("prompts",),
    "sample_length": ("prompts",),
    "temperature": ("prompts",),
    "top_k": ("prompts",),
    "top_p": ("prompts",),
}
DEFAULTS = {name: field.default for name, field in Settings.__dataclass_fields__.items()}


def task_names(settings: Settings) -> list[str]:
    """Return the tasks of lm-eval, each once."""
    names = [name.strip() for names in settings.eval_tasks for name in names.split(",")]
    return list(dict.fromkeys(filter(None, names)))


def tokenizer_dir(sources: Sequence[Source]) -> Path:
    """Return where the tokenizer that made the training data is."""
    return sources[0].tokenizer_directory()


def tokens_at_once(settings: Settings, model_config: "PretrainedConfig", tokenizer: Any) -> int:
    """Return how many tokens a text may have in a forward pass beside training.

    No more than a sequence of training: the model has learned no place behind it, and the memory
    that is free has room for no more.

    Args:
        settings: resolved as far as possible.
        tokenizer: of transformers; None for one of tiktoken.
    """
    from zerolm.evaluate.text_coder import max_length

    positions = max_length(model_config, tokenizer)
    return positions if settings.seq_len is None else min(positions, settings.seq_len)


def problems(settings: Settings) -> list[str]:
    """Return what is wrong with the settings of evaluations and samples, a line each."""
    found = []
    for name, needed in NEEDED.items():
        changed = name in settings.explicit and getattr(settings, name) != DEFAULTS[name]
        if changed and not any(getattr(settings, each) for each in needed):
            flags = " or ".join(f"--{each}" for each in needed)
            found.append(
                f"{settings.where(name)}: {getattr(settings, name)}, needs {flags}. Add it, or "
                f"remove this."
            )
    if not 0 < settings.top_p <= 1:
        found.append(
            f"{settings.where('top_p')}: {settings.top_p}, must be above 0 and at most 1. Use 1 "
            f"to draw from all tokens."
        )
    return found


def missing(
    settings: Settings,
    sources: Sequence[Source],
    model_config: "PretrainedConfig | None",
    environment: Mapping[str, str],
) -> list[str]:
    """Return why what is asked for cannot be done with what there is, a line each.

    A file may have been moved since the run began, a hub may not answer: what has trained for days
    goes on all the same, only a new run is refused.

    Args:
        sources: of training; empty when none could be opened.
        model_config: None when it could not be read.
        environment: of the launcher.
    """
    found: list[str] = []
    asked = [name for name in ("hellaswag", "eval_tasks", "prompts") if getattr(settings, name)]
    if not asked or not sources:
        return found
    try:
        from zerolm.evaluate.text_coder import TextCoder

        coder = TextCoder(tokenizer_dir(sources), sources[0].eos_id)
    except ConfigError as error:
        where = settings.where(asked[0])
        return found + [f"{where}: needs a tokenizer: {problem}" for problem in error.problems]
    if environment.get("RANK", "0") != "0":
        return found
    checks = {
        "hellaswag": lambda: _check_hellaswag(settings, coder, model_config),
        "eval_tasks": lambda: _load_tasks(settings),
        "prompts": lambda: _check_prompts(settings, coder, model_config),
    }
    for name in asked:
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
        longest = tokens_at_once(settings, model_config, coder.tokenizer)
        coder.rows([item.requests for item in items], longest)
    except ConfigError as error:
        raise ConfigError([f"{name}: {problem}" for problem in error.problems]) from None


def _load_tasks(settings: Settings) -> None:
    from zerolm.evaluate.lm_eval import load_tasks

    names = task_names(settings)
    if not names:
        raise ConfigError("names no task. Write for example --eval_tasks arc_easy,piqa.")
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
    longest = tokens_at_once(settings, model_config, coder.tokenizer)
    for number, prompt in enumerate(prompts, 1):
        tokens = len(prompt_ids(coder, prompt))
        if tokens + settings.sample_length > longest:
            raise ConfigError(
                f"{path}: prompt {number} has {tokens} tokens, with --sample_length "
                f"{settings.sample_length} they must not exceed the {longest} of --seq_len and of "
                f"the model. Shorten one of them."
            )


def figures(settings: Settings) -> dict[str, str]:
    """Return a line for the evaluations and for the samples, if there are any."""
    lines = {}
    what = [f"HellaSwag ({settings.hellaswag_items or 'all'} items)"] if settings.hellaswag else []
    what += task_names(settings)
    if what:
        lines["downstream"] = f"{', '.join(what)} every {settings.downstream_interval} steps"
    if settings.prompts:
        when = (
            f"every {settings.sample_interval:,} tokens"
            if settings.sample_interval
            else ("after each doubling of the tokens")
        )
        lines["samples"] = f"of {settings.prompts}, {when}"
    return lines
