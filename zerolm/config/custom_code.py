"""Finds keys in config and tokenizer files that would make transformers run or download code.

Such files may come from anyone, so their code is never executed, downloaded, or offered for
execution. Every call that loads such a file passes `trust_remote_code=False` (a test enforces
this), and the functions here name the key to remove. Must not import transformers.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerolm.common.errors import reason

# Keys in config.json that select transformers' kernels, and the values that neither download nor
# import anything. Any other value may name a hub repository ("org/kernel") or a kernel that
# transformers downloads on first use.
KERNEL_KEYS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
ADAPTER = "adapter_config.json"


def tokenizer_problem(directory: Path) -> str | None:
    """Return why a tokenizer needs Python code from its directory, or None if it does not."""
    file = directory / "tokenizer_config.json"
    code = _read(file).get("auto_map")
    if isinstance(code, dict):
        code = code.get("AutoTokenizer")
    if not code:
        return None
    return (
        f"{file}: auto_map: refers to the tokenizer's Python code ({_shown(code)}), which is never "
        "executed. If a transformers class produces the same ids from the other files, remove the "
        "key; otherwise save the tokenizer as tokenizer.json."
    )


def kernel_problems(file: Path, values: Mapping[str, Any]) -> list[str]:
    """Return one line for each key, at any depth of a config, that names a kernel to download."""
    return [
        f"{file}: {key}: {_shown(name)} names code that would be downloaded and executed. Remove "
        f"the key."
        for key, name in _named_kernels(values)
    ]


def model_problems(directory: Path) -> list[str]:
    """Return one line for each key or file of an exported model that would run or download code."""
    file = directory / "config.json"
    values = _read(file)
    problems = kernel_problems(file, values)
    problems += [
        f"{file}: {key}: {why}. Use a directory written by `zerolm export`."
        for key, why in (
            ("auto_map", "refers to the model's Python code, which is never executed"),
            ("quantization_config", "needs kernels that would be downloaded and executed"),
        )
        if values.get(key)
    ]
    if (directory / ADAPTER).exists():
        problems.append(
            f"{directory / ADAPTER}: an adapter, whose code would be imported. Merge it into the "
            f"weights, or remove it."
        )
    tokenizer = tokenizer_problem(directory)
    return problems + ([tokenizer] if tokenizer else [])


def _named_kernels(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, name) for each kernel named in a config or its sub-configs."""
    if isinstance(values, list):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        dotted = f"{path}{key}"
        harmless = KERNEL_KEYS.get(str(key).removeprefix("_"))
        if harmless is None:
            yield from _named_kernels(value, f"{dotted}.")
            continue
        # A dictionary maps parts of the model to kernel names.
        names = value.values() if isinstance(value, dict) else [value]
        for name in names:
            if name is not None and name not in harmless:
                yield dotted, name


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it is absent or not an object."""
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}  # reported by the code that loads the file
    return values if isinstance(values, dict) else {}


def _shown(value: Any) -> str:
    return reason(json.dumps(value))
