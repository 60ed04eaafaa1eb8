"""Set each documented key of every family away from its default, and compare with transformers.

    python -m tests.model_families.keys --output /tmp/keys.jsonl [--only llama,gpt2]

The reference builds both models by transformers alone: a key has an effect if logits or initial
weights differ. An outcome is `refused` or `said` (with the key's name), `effect`, or `silent`: no
effect, and no word about it.
"""

import argparse
import copy
import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from tests.model_families.sweep import FAMILIES
from tests.model_families.toy_configs import SIZES, toy_config
from tests.readers.models import finite
from zerolm.common.errors import ConfigError, Findings
from zerolm.model.model import Model
from zerolm.preflight import key_effects, model_proof

ROWS, TOKENS = 2, 30
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
# Keys about outputs, other tasks or files; sizes, which change shapes; router losses.
NOT_TRIED = re.compile(
    r"token_id|^output_|^use_cache|classifier|summary|^is_|cross_attention|^_|coef|_loss|"
    r"^(problem_type|finetuning_task|chunk_size_feed_forward|dtype|model_type|initializer_factor)$"
)

# Values that act in the toy's rows, weights and vocabulary, where the next number would not.
SMALLER = {
    "floor_scale": 5, "log_scaling_n_floor": 5, "rel_l2_clip_threshold": 1e-3,
    "unpadded_vocab_size": 300,
}  # fmt: skip


def trials(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (key, config.json) for each key of a family away from the toy's value."""
    base = finite(toy_config(family))
    inner = base.get("text_config")
    part: dict[str, Any] = inner if isinstance(inner, dict) else base
    text = type(CONFIG_MAPPING[family]().get_text_config())
    general = {*vars(PreTrainedConfig()), "tie_word_embeddings"} - {"tie_word_embeddings"}
    for key, value in part.items():
        if (key in SIZES and "window" not in key) or key in general or NOT_TRIED.search(key):
            continue
        if not hasattr(text, key) or not isinstance(value, bool | int | float | str):
            continue
        other: Any = value
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, int):
            other = SMALLER.get(key, value + 1 if "window" not in key else 5)
        elif isinstance(value, float):
            other = SMALLER.get(key, value * 1.5 or 0.1)
        elif "act" in key:
            other = "relu" if value != "relu" else "gelu"
        if other != value:
            yield key, _with(base, key, other)
    if isinstance(part.get("rope_parameters"), dict):
        used = part["rope_parameters"]
        for kind, values in SCALINGS.items():
            theta = {"rope_theta": used["rope_theta"]} if "rope_theta" in used else {}
            rope = {"rope_type": kind, **theta, **values}
            yield f"flat {kind}", _with(base, "rope_parameters", rope)
            kinds = {name: each for name, each in used.items() if isinstance(each, dict)}
            if kinds:
                nested = {name: {**each, **rope} for name, each in kinds.items()}
                yield f"{kind} by layer", _with(base, "rope_parameters", nested)


def _with(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(base)
    part = changed["text_config"] if isinstance(changed.get("text_config"), dict) else changed
    part[key] = value
    return changed


def said(values: dict[str, Any], key: str, whole: bool = False) -> tuple[str, str]:
    """Return "refused", "said" or "", and the line.

    Args:
        whole: whether the model is proven, too.
    """
    name = r"rope_(parameters|scaling)" if " " in key else rf"\b{re.escape(key)}\b"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(values))
        found = Findings([])
        try:
            model = Model.load(str(path))
            found.notices += model.notices
            (model_proof if whole else key_effects).check(model, TOKENS, found)
        except ConfigError as error:
            found.problems += error.problems
    if found.problems:
        return "refused", found.problems[0].replace(f"{path}: ", "")
    lines = [line for line in found.notices if "no effect" in line and re.search(name, line)]
    return ("said", lines[0].replace(f"{path}: ", "")) if lines else ("", "")


@functools.lru_cache(maxsize=2)
def outcome_of(text: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Return initial weights and a model with large weights, both by transformers alone."""
    values = json.loads(text)
    config = type(CONFIG_MAPPING[values["model_type"]]()).from_dict(copy.deepcopy(values))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            size = max(1, parameter.shape[-1]) ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)
    return initial, model.train()


def has_effect(base: dict[str, Any], changed: dict[str, Any]) -> bool | None:
    """Return whether two configs give different models; None if one cannot be computed."""
    try:
        (first, one), (second, other) = (
            outcome_of(json.dumps(base)),
            outcome_of(json.dumps(changed)),
        )
        same = first.keys() == second.keys() and all(
            torch.equal(first[name], second[name]) for name in first
        )
        if not same:
            return True
        ids = torch.randint(8, 512, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
        logits = []
        for model in (one, other):
            torch.manual_seed(3)
            with torch.no_grad():
                logits.append(model(input_ids=ids, use_cache=False).logits)
        return not torch.equal(*logits)
    except Exception:
        return None


def row(family: str, key: str, values: dict[str, Any]) -> dict[str, str]:
    found = has_effect(finite(toy_config(family)), values)
    kind, line = ("effect", "") if found else said(values, key)
    if not kind:
        kind, line = said(values, key, whole=True)
    outcome = kind or ("silent" if found is False else "not computed")
    return {"family": family, "key": key, "outcome": outcome, "line": line}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", help="comma-separated model types (default: all)")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    with open(arguments.output, "w", encoding="utf-8") as file:
        for family in arguments.only.split(",") if arguments.only else FAMILIES:
            try:
                tried = list(trials(family))
            except Exception as error:
                print(f"{family}: left out: {type(error).__name__}: {error}", flush=True)
                continue
            for key, values in tried:
                found = row(family, key, values)
                counts[found["outcome"]] += 1
                file.write(json.dumps(found) + "\n")
                file.flush()
    print(dict(counts))


if __name__ == "__main__":
    main()
