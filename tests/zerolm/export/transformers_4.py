"""Prints what transformers 4 computes for exported models: their values are in transformers_4.json.

    python -m tests.zerolm.export.test_other_readers exports        # in this environment
    python tests/zerolm/export/transformers_4.py exports > tests/zerolm/export/transformers_4.json

The second command needs an environment of its own: `pip install transformers==4.57.6 torch`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ("two words", "don't STOP 2024", "  a\n\nb", " e\u0301")
IDS = [list(range(3, 35))]


def logits_of(directory: Path) -> list[list[float]]:
    """Return five logits at each of four positions."""
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor(IDS), use_cache=False).logits[0]
    return [[round(value, 6) for value in row] for row in logits_TV[7::8, 1::60].tolist()]


def read(directory: Path) -> dict:
    config = json.loads((directory / "config.json").read_text())
    older = [key for key in config if "rope" in key or "rotary" in key or key == "num_experts"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return {
        "keys": {key: config[key] for key in sorted(older) if key != "rope_parameters"},
        "logits": logits_of(directory),
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
    }


if __name__ == "__main__":
    found = {each.name: read(each) for each in sorted(Path(sys.argv[1]).iterdir())}
    rows = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    print("{\n" + ",\n".join(rows) + "\n}")
