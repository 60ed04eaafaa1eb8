"""Readers of other versions compute the exported model: transformers 4, and those with its keys."""

import json
import sys
import zlib
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from tests.model_families.toy_configs import toy_config
from tests.zerolm.export.transformers_4 import TEXTS, logits_of
from zerolm.export.export import load_exported, write_model
from zerolm.export.older_keys import rope_keys, set_tied
from zerolm.model.config_file import load_model_config
from zerolm.pretrained.source_config import compare

VALUES = json.loads((Path(__file__).parent / "transformers_4.json").read_text())
SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}


def llama(**scaling) -> dict:
    return {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": scaling or None}


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}
LONGROPE = {"original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope", **FACTORS}}
CASES = {
    "theta": llama(),
    "linear": llama(rope_type="linear", factor=4.0),
    "dynamic": llama(rope_type="dynamic", factor=4.0),
    "yarn": llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn_factor": llama(type="yarn", factor=4.0, beta_fast=16.0, attention_factor=1.3),
    "llama3": llama(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "longrope": {**llama(), **LONGROPE},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16,
        "decoder_sparse_step": 1, "rope_theta": 30000.0,
    },
    "gemma": {"model_type": "gemma", "rope_theta": 30000.0},
    "gemma3": {
        "model_type": "gemma3_text", "rope_theta": 300000.0, "rope_local_base_freq": 3000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"model_type": "mixtral", **EXPERTS, "num_local_experts": 4, "rope_theta": 3e5},
    "gpt_neox": {
        "model_type": "gpt_neox", "rotary_emb_base": 30000.0, "rotary_pct": 0.5,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "phi3": {"model_type": "phi3", "rope_theta": 30000.0, **LONGROPE, "pad_token_id": 0},
    "olmo2": {
        "model_type": "olmo2", "rope_theta": 30000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "olmo3": {
        "model_type": "olmo3", "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 30000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 4.0},
        },
    },
}  # fmt: skip


class Weights:
    """Weights that are the same on every machine: sines, whose phase comes from the name."""

    def __init__(self, config):
        with torch.device("meta"):
            self.state = AutoModelForCausalLM.from_config(config).state_dict()

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.state[name].shape
        steps = torch.arange(shape.numel(), dtype=torch.float64).reshape(shape)
        values = torch.sin(steps * 12.9898 + zlib.crc32(name.encode()) % 1000) * 0.4
        return (1 + values / 4 if "norm" in name else values).float()

    def release(self) -> None:
        pass


def export(case: str, directory: Path, tokenizer: Path) -> str:
    """Write the exported model of a case; return what was said."""
    config = AutoConfig.for_model(**{**SIZES, **CASES[case]})
    manifest = {"precision": "fp32", "model_config": config.to_dict()}
    return write_model(
        Weights(config), manifest, directory, None, tokenizer, 0,
        lambda _: {"README.md": b"AutoTokenizer"}, lambda path, _: str(bool(load_exported(path))),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["mistral", "mixtral", "stablelm"])
def test_a_rotated_share_that_a_family_ignores_is_not_exported(family, tmp_path, monkeypatch):
    """transformers 4's Mistral obeys it, and then fails."""
    share = {"partial_rotary_factor": 0.5}
    plain = {"model_type": family, "head_dim": None}
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    written, said = {}, {}
    for name, more in (("plain", {}), ("share", share)):
        monkeypatch.setitem(CASES, name, {**plain, **more})
        said[name] = export(name, tmp_path / name, tokenizer)
        written[name] = json.loads((tmp_path / name / "config.json").read_text())
    if family == "stablelm":  # its own default is 0.25
        assert written["share"]["rope_parameters"].items() >= share.items()
        assert "is left out" not in said["share"]
    else:
        assert written["share"] == written["plain"]
        line = f"partial_rotary_factor 0.5 is left out, since {family} rotates all 8 values"
        assert line in said["share"] and line not in said["plain"]


def write_tokenizer(directory: Path) -> Path:
    train_bpe([*TEXTS] * 9, BpeOptions(300), directory, progress=False)
    return directory


@pytest.mark.parametrize("case", CASES)
def test_version_4_computes_the_exported_model(case, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    said = export(case, tmp_path / "model", tokenizer)
    theirs = VALUES[case]
    logits = torch.tensor(theirs["logits"])
    torch.testing.assert_close(
        torch.tensor(logits_of(tmp_path / "model")), logits, rtol=0, atol=1e-4 * logits.abs().max()
    )
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert {key: values[key] for key in theirs["keys"]} == theirs["keys"], "what version 4 has read"
    assert values["torch_dtype"] == "float32"
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert [backend.encode(text).ids for text in TEXTS] == theirs["ids"]
    assert "transformers 4" not in said, said

    given, notices = AutoConfig.for_model(**{**SIZES, **CASES[case]}), []
    again = load_model_config(tmp_path / "model", notices)
    assert not compare(given, "given", again, "export").problems, "--init_from accepts the export"
    assert not [line for line in notices if any(key in line for key in theirs["keys"])]


def test_an_export_names_rotary_embeddings_that_version_4_cannot_have(tmp_path):
    default, linear = ({"rope_type": "default", "rope_theta": 1e4}, {"rope_theta": 1e4})
    linear |= {"rope_type": "linear", "factor": 2.0}
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    for model, full, sliding in (
        ("gemma3_text", default, linear),
        ("olmo3", default, {**default, "rope_theta": 2e4}),
        ("modernbert-decoder", default, {**default, "rope_theta": 2e4}),
        ("gemma4_text", {**default, "rope_type": "proportional"}, default),
    ):
        by_layer = {"full_attention": full, "sliding_attention": sliding}
        config = AutoConfig.for_model(
            model, **SIZES, **layers, rope_parameters=json.loads(json.dumps(by_layer))
        )
        assert rope_keys(config) is None, model
        CASES[model] = {"model_type": model, **layers, "rope_parameters": by_layer}
    said = export("gemma3_text", tmp_path / "model", write_tokenizer(tmp_path / "tokenizer"))
    assert f"note: {tmp_path / 'model' / 'config.json'}: no older keys are equivalent to" in said


@pytest.mark.parametrize(
    ("family", "tied"), [("bigbird_pegasus", False), ("got_ocr2", True), ("gemma", True)]
)
def test_both_parts_of_a_config_say_whether_the_output_embeddings_are_tied(family, tied):
    config = AutoConfig.for_model(**toy_config(family))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    set_tied(config, model)
    parts = (config, config.get_text_config())
    assert [part.tie_word_embeddings for part in parts] == [tied, tied]


def test_an_export_whose_config_gives_other_ids_says_so(tmp_path):
    """transformers 5 builds the tokenizer of a qwen2 model by class, whatever its files name."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    said = export("qwen2", tmp_path / "model", tokenizer)
    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs.encode(" e\u0301") != backend.encode(" e\u0301").ids
    assert f"note: {tmp_path / 'model'}: AutoTokenizer loads it as Qwen2Tokenizer, which" in said
    assert (tmp_path / "model" / "README.md").read_text() == "PreTrainedTokenizerFast"


if __name__ == "__main__":
    for name in CASES:
        export(name, Path(sys.argv[1]) / name, write_tokenizer(Path(sys.argv[1] + ".tokenizer")))
