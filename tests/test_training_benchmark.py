"""The training benchmark: litgpt's model equals the Hugging Face one, and its log is parsed."""

import json
import subprocess
import sys

import pytest

from benchmarks.contenders.litgpt_shape import litgpt_shape
from benchmarks.contenders.turns import LITGPT_LINE, STEP_LINE
from benchmarks.training_speed import num_parameters
from tests import ROOT

CONFIGS = ("tiny", "llama-160m", "llama-1.3b")


def parameters(shape: dict) -> int:
    """Return litgpt's number of parameters: from its own class if installed, else by formula."""
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
def test_litgpts_config_has_as_many_parameters_as_the_model_config(name):
    path = ROOT / f"model_configs/{name}.json"
    shape = litgpt_shape(json.loads(path.read_text()), 256)
    assert parameters(shape) == num_parameters(str(path))


def test_all_keys_that_litgpt_does_not_support_are_refused_at_once():
    with pytest.raises(ValueError, match=r"(?s)model_type: gpt_neox.*attention_bias: True"):
        litgpt_shape({"model_type": "gpt_neox", "attention_bias": True}, 256)
    config = str(ROOT / "model_configs/mixtral-tiny.json")
    command = [
        ROOT / "benchmarks/training_speed.py",
        "--litgpt",
        "python",
        "--model_config",
        config,
    ]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "model_type: mixtral" in done.stderr


def test_litgpts_log_line_is_parsed_as_a_step():
    litgpt = "Epoch 1 | iter 8 step 4 | loss train: 8.341, val: n/a | iter time: 123.45 ms (step)"
    match = LITGPT_LINE.match(litgpt)
    assert match is not None and match[1] == "4" and STEP_LINE.match(litgpt) is None
