"""A model card describes the run and contains no path of the machine."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from zerolm.export.model_card import model_card

MANIFEST = {
    "progress": {"step": 20, "tokens": 40_000},
    "model_config": {"model_type": "llama"},
    "zero_stage": 3,
    "world_size": 16,
    "precision": "bf16",
    "optimizer": "AdamW, offload none",
    "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
    "data_fingerprint": "9c6915d0515c",
}
RUN = {
    "settings": {
        "data": ["/data/ours/shards/web=0.7"],
        "run_dir": "/data/ours/runs/first",
        "seq_len": 2048,
        "batch_tokens": 524288,
        "schedule": "cosine",
        "learning_rate": 3e-4,
        "document_mask": True,
    },
    "ds_config": {
        "zero_optimization": {"stage": 3, "offload_param": {"nvme_path": "/data/ours/nvme"}},
        "tensorboard": {"enabled": True, "output_path": "boards"},
    },
    "git_commit": "0123abcd",
}


def write_run(directory):
    (directory / "run.json").write_text(json.dumps(RUN))
    rows = [
        {
            "step": step,
            "tokens": step * 2000,
            "train/loss": 9.0 - step / 10,
            "data/web|2/tokens": step * 1500,
            "data/web|2/epochs": step / 40,
            "data/code/tokens": step * 500,
            "data/code/epochs": step / 10,
        }
        for step in range(1, 31)
    ]
    rows += [
        {"step": 20, "tokens": 40_000, "eval/loss": 7.25, "eval/perplexity": 1408.1},
        {"step": 10, "tokens": 20_000, "eval/hellaswag/acc_norm": 0.31},
        {"step": 30, "tokens": 60_000, "eval/loss": 6.5},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_card_ends_at_its_checkpoint_and_names_no_path(tmp_path):
    write_run(tmp_path)
    text = model_card(tmp_path, MANIFEST, "us/first", 1_234_567, picture=True)
    for words in (
        "1,234,567 parameters",
        "40,000 tokens",
        "ZeRO-3, bf16",
        "| `web\\|2` | 30,000 | 75.0% | 0.5 |",
        "| code | 10,000 | 25.0% | 2 |",
        "| train/loss (mean of the last rows) | 7.4500 | 20 |",
        "| eval/loss | 7.2500 | 20 |",
        "| eval/hellaswag/acc_norm | 0.3100 | 10 |",
        "| batch (tokens) | 524,288 |",
        "attention within documents only | yes",
        "![loss over tokens](loss.png)",
        '"stage": 3',
        "| commit | 0123abcd |",
    ):
        assert words in text, words
    assert "6.5" not in text and "/data/ours" not in text and "boards" not in text
    path = tmp_path / "README.md"
    path.write_text(text)
    data = ModelCard.load(path).data
    assert (
        data.to_dict()["library_name"] == "transformers" and data.pipeline_tag == "text-generation"
    )
    results = [
        (each.dataset_name, each.metric_type, each.metric_value) for each in data.eval_results
    ]
    assert sorted(results) == [
        ("validation", "loss", 7.25),
        ("validation", "perplexity", 1408.1),
    ]


EVIL = (
    "<img src=x onerror=alert(1)> [a](http://x.example) ![b](//x) `c` | www.x.example\n# d \u202e"
)


def test_names_in_the_files_of_a_run_are_shown_as_text(tmp_path):
    """Neither HTML nor a link, nor a metric with more parts than ours; each is in a code span."""
    write_run(tmp_path)
    settings = dict.fromkeys(("schedule", "seed", "learning_rate"), EVIL)
    run = {**RUN, "settings": settings, "git_commit": EVIL, "ds_config": {"optimizer": EVIL}}
    entry = {"given": "", "source": EVIL, "hub_id": "", "digest": "", "about": "", "vocab_size": 1}
    (tmp_path / "run.json").write_text(json.dumps({**run, "initial_weights": entry}))
    row = {"step": 20, "tokens": 20, "data/a/b/tokens": 3, f"data/{EVIL}/tokens": 4}
    row |= {"data//tokens": 1, "data/tokens": 1, f"eval/{EVIL}": 1.0, f"eval/{EVIL}/x/y": 2.0}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    manifest = {**MANIFEST, "optimizer": EVIL, "versions": {EVIL: EVIL}, "precision": EVIL}
    text = model_card(tmp_path, manifest, EVIL, 1, picture=False)
    _, front, body = text.split("---\n", 2)
    body = re.sub(r"(?s)```.*?```", "", body)  # code, and the ds config
    outside = re.sub(r"`[^`\n]*`", "", body)
    tags = set(re.findall(r"<[^>]*>", outside))
    assert tags == {"<details>", "<summary>", "</summary>", "</details>"}
    assert not re.search(r"\]\(|//|www|\u202e|^# d", outside, re.M) and "alert(1)" in body
    assert "| a/b | 3 |" in body and yaml.safe_load(front)


def test_a_checkpoint_without_a_run_directory_has_a_card(tmp_path):
    text = model_card(tmp_path, MANIFEST, "first", 10, picture=False)
    assert "# first" in text and "40,000 tokens" in text and "loss.png" not in text


@pytest.mark.parametrize(
    ("hub_id", "source", "name"),
    [("org/model", "org/model@0123", "org/model"), ("", "/data/ours/runs/trunk@30", "trunk@30")],
)
def test_a_card_names_the_weights_that_the_run_began_with(tmp_path, hub_id, source, name):
    write_run(tmp_path)
    entry = {
        "given": source, "source": source, "hub_id": hub_id, "digest": "0", "about": "",
        "vocab_size": 64,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({**RUN, "initial_weights": entry}))
    text = model_card(tmp_path, MANIFEST, "first", 1000, picture=False)
    assert f"pretrained from the weights of `{name}` on 40,000 tokens" in text
    assert ModelCard(text).data.base_model == (hub_id or None)
    assert "/data/ours" not in text
