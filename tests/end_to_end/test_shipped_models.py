"""Each shipped model config, reduced to two narrow layers, trains with ZeRO-2 and ZeRO-3."""

import json
import math

import pytest

from tests import tracked
from tests.end_to_end import runs_in_one_process
from tests.end_to_end.recipe import profile, recipe
from tests.launching import VOCABULARY, rows, write_json

SHIPPED = tracked("model_configs/*.json")
STEPS, LAYERS, HEAD = 3, 2, 16


def reduced(config: dict) -> dict:
    """Return the config with two layers and narrow heads, and otherwise the same architecture."""
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
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stage", [2, 3])
def test_shipped_models_learn_in_three_steps(tmp_path, corpus, stage) -> None:
    jobs = []
    for file in SHIPPED:
        model = write_json(tmp_path / file.name, reduced(json.loads(file.read_text())))
        ds = profile(tmp_path / "ds.json", stage, bf16=True)
        flags = recipe(model, corpus, tmp_path / file.stem, ds, STEPS, micro=2)
        jobs.append({"flags": [*flags, "--wandb", "off"]})
    output = runs_in_one_process.launch(jobs, tmp_path)
    wrong = {}
    for file in SHIPPED:
        losses = list(rows(tmp_path / file.stem, "train/loss").values())
        print(f"{file.stem}, ZeRO-{stage}: {losses}")
        if not (len(losses) == STEPS and losses[-1] < losses[0]) or (
            abs(losses[0] - math.log(VOCABULARY)) > 0.5
        ):
            wrong[file.stem] = losses
    assert not wrong, f"{wrong}\n{output[-4000:]}"
