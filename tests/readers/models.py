"""Exported toy models of every family, and what this version of transformers computes from them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from tests.model_families.toy_configs import FIRST_TEXT_TOKEN, VOCABULARY, toy_config
from tests.readers.read_models import NEW_TOKENS
from zerolm.export.export import load_exported, write_model

NUM_IDS = 40  # more than the window of the toy configs
BASE = {"rope_theta": 500000.0}
POSITIONS = {"original_max_position_embeddings": 16}
# {variant: keys that a toy config gets}; a family's name may be followed by a variant
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {"rope_parameters": {"rope_type": "default", **BASE}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **BASE}},
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **BASE},
        "max_position_embeddings": 16,
    },
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **POSITIONS, **BASE}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            **POSITIONS, **BASE,
        }
    },
    "partial": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **BASE}},
    "window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}  # fmt: skip


def texts(number: int = 400) -> list[str]:
    """Return texts of random words, numbers and other characters, the same on every machine."""
    generator = random.Random(0)
    parts = ["the", "The", "don't", "I'LL", "naïve", "e\u0301", "日本", "été", "12345", "7", "f(x)"]
    parts += ["==", "\n", "\n\n", "\t", "  ", "HTTPServer", "ﬁ", "🙂", "a_b", "3.14", "--", "\r\n"]
    spaces = [" ", " ", " ", "", "   "]
    return [
        "".join(generator.choice(parts) + generator.choice(spaces) for _ in range(40))
        for _ in range(number)
    ]


class Weights(dict):
    def release(self) -> None:
        pass


def write_models(families: list[str], directory: Path) -> dict[str, Any]:
    """Write the exports, unless they are there; return {family: logits and greedy ids}."""
    tokenizer, models = directory / "tokenizer", directory / "models"
    train_bpe(texts(), BpeOptions(VOCABULARY, split="llama3"), tokenizer, progress=False)
    models.mkdir(exist_ok=True)
    generator = random.Random(1)
    ids = [generator.randrange(FIRST_TEXT_TOKEN, VOCABULARY) for _ in range(NUM_IDS)]
    (models / "ids.json").write_text(json.dumps(ids))
    computed = {}
    for family in families:
        try:
            if not (models / family).exists():
                name, _, variant = family.partition(" ")
                write_one(name, models / family, tokenizer, variant)
            computed[family] = compute(models / family, ids)
        except Exception as error:  # such as reformer's, which takes rows of 32 tokens only
            print(f"{family}: left out: {type(error).__name__}: {error}", flush=True)
    return computed


def write_one(family: str, directory: Path, tokenizer: Path, variant: str = "") -> None:
    """Write the export of a toy model whose weights are the same on every machine."""
    values = finite(toy_config(family))
    values |= VARIANTS.get(variant, {})
    config = type(AutoConfig.for_model(family)).from_dict(values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # large enough for attention and routers to be decisive
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    write_model(
        Weights(model.state_dict()), {"precision": "fp32", "model_config": config.to_dict()},
        directory, None, tokenizer, 0, lambda _: {}, lambda *_: "",
    )  # fmt: skip


def finite(value: Any) -> Any:
    """Return a value of a toy config without transformers' own notation of infinity."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "__float__" in value:
        return float(value["__float__"])
    return {key: finite(each) for key, each in value.items()}


def compute(directory: Path, ids: list[int]) -> dict[str, Any]:
    model = load_exported(directory).eval()
    found = list(ids)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        for _ in range(NEW_TOKENS):
            last = model(input_ids=torch.tensor([found]), use_cache=False).logits[0, -1]
            found.append(int(last.argmax()))
    return {"logits": logits, "greedy": found[len(ids) :]}
