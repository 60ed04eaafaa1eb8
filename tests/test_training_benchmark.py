"""The training benchmark: litgpt's model is the Hugging Face one, its lines are understood."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from contender import LITGPT_LINE, STEP_LINE  # noqa: E402 - benchmarks are scripts, not a package
from litgpt_shape import litgpt_shape  # noqa: E402
from training_speed import num_parameters  # noqa: E402

CONFIGS = ("tiny", "llama-160m", "llama-1.3b")


def parameters(shape: dict) -> int:
    """Count what litgpt builds of a shape, by its own class if it is there, else on paper."""
    try:
        import torch
        from litgpt import Config
        from litgpt.model import GPT
    except ImportError:
        head_size = shape["head_size"] or shape["n_embd"] // shape["n_head"]
        heads = shape["n_head"] + 2 * shape["n_query_groups"]
        width = shape["n_embd"]
        attention = width * heads * head_size + width * shape["n_head"] * head_size
        layer = attention + 3 * width * shape["intermediate_size"] + 2 * width
        return 2 * shape["padded_vocab_size"] * width + shape["n_layer"] * layer + width
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(Config(**shape)).parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_in_litgpts_words_has_as_many_parameters(name):
    path = ROOT / f"model_configs/{name}.json"
    shape = litgpt_shape(json.loads(path.read_text()), 256)
    assert parameters(shape) == num_parameters(str(path))


def test_what_litgpt_cannot_say_is_refused_at_once():
    with pytest.raises(ValueError, match=r"(?s)model_type: gpt_neox.*attention_bias: True"):
        litgpt_shape({"model_type": "gpt_neox", "attention_bias": True}, 256)
    config = str(ROOT / "model_configs/mixtral-tiny.json")
    words = [ROOT / "benchmarks/training_speed.py", "--litgpt", "python", "--model_config", config]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "model_type: mixtral" in done.stderr


def test_lines_of_both_are_steps():
    litgpt = "Epoch 1 | iter 8 step 4 | loss train: 8.341, val: n/a | iter time: 123.45 ms (step)"
    match = LITGPT_LINE.match(litgpt)
    assert match is not None and match[1] == "4" and STEP_LINE.match(litgpt) is None
