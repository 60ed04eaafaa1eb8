"""Each shipped model config, made shallow and narrow, trains under ZeRO-2 and ZeRO-3."""

import json
import math

import pytest
from recipe import profile, recipe

from tests.launching import ROOT, VOCABULARY, launch, rows, write_json

SHIPPED = sorted((ROOT / "model_configs").glob("*.json"))
STEPS, LAYERS, HEAD = 3, 2, 16


def reduced(config: dict) -> dict:
    """Return a config of two layers and narrow heads; what makes its architecture stays."""
    short = config["model_type"] == "gpt2"
    heads, width, depth = ("n_head", "n_embd", "n_layer") if short else (
        "num_attention_heads", "hidden_size", "num_hidden_layers"
    )  # fmt: skip
    shrink = max(1, config[heads] // 8)
    grouped = config.get("num_key_value_heads")
    small = dict(config) | {"vocab_size": VOCABULARY, depth: LAYERS}
    small |= {heads: config[heads] // shrink, width: config[heads] // shrink * HEAD}
    if grouped:
        small["num_key_value_heads"] = max(1, grouped // shrink)
    if "head_dim" in config:
        small["head_dim"] = HEAD
    if "intermediate_size" in config:
        small["intermediate_size"] = 128
    return small


def test_a_reduced_config_keeps_its_ratio_of_heads() -> None:
    for file in SHIPPED:
        config = json.loads(file.read_text())
        small = reduced(config)
        assert small.keys() == config.keys()
        if "num_key_value_heads" in config:
            before, after = (
                one["num_attention_heads"] // one["num_key_value_heads"] for one in (config, small)
            )
            assert before == after, file.name


@pytest.mark.soak
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_three_steps(tmp_path, corpus, file, stage) -> None:
    model = write_json(tmp_path / "model.json", reduced(json.loads(file.read_text())))
    ds = profile(tmp_path / "ds.json", stage, bf16=True)
    run = tmp_path / "run"
    done = launch(2, *recipe(model, corpus, run, ds, STEPS, micro=2), "--wandb", "off")
    assert done.returncode == 0, done.stdout[-4000:]
    losses = list(rows(run, "train/loss").values())
    assert len(losses) == STEPS
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.5 and losses[-1] < losses[0]
