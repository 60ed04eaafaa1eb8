"""An exported model is for inference, and its files are for all users that the umask admits."""

import json
import os
import stat

import pytest
import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from zerolm.export.export import write_model
from zerolm.shards.tokenizer import make_portable

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "output_router_logits": True,
}  # fmt: skip
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "gpt_oss")


class Weights(dict):
    def release(self) -> None:
        pass


def write(model_type: str, directory, tokenizer) -> str:
    config = AutoConfig.for_model(
        model_type, **SIZES, num_experts=4, num_local_experts=4, num_experts_per_tok=2
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    manifest = {"precision": "fp32", "model_config": config.to_dict()}
    return write_model(
        Weights(model.state_dict()), manifest, directory, None, tokenizer, 0,
        lambda _: {"README.md": b""}, lambda *_: "", 40_000,
    )  # fmt: skip


@pytest.mark.parametrize("model_type", MIXTURES)
def test_the_loss_of_an_exported_mixture_is_cross_entropy(model_type, tmp_path):
    said = write(model_type, tmp_path / "model", None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        outputs = model(input_ids=ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(outputs.loss, expected)
    assert "note: config.json has output_router_logits false, for inference." in said


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_all_files_have_the_mode_of_the_umask(umask, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    train_bpe(["some text"] * 9, BpeOptions(260), tokenizer, progress=False)
    (tokenizer / "tokenizer.json").chmod(0o400)
    before = os.umask(umask)
    try:
        write("mixtral", tmp_path / "model", tokenizer)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) > 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


@pytest.mark.parametrize("split", ["gpt2", "llama3", "o200k"])
def test_a_trained_tokenizer_says_that_it_adds_no_bos(split, tmp_path):
    train_bpe(["some text"] * 9, BpeOptions(260, split=split), tmp_path, progress=False)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] is False


def test_a_copy_says_what_a_tokenizer_without_a_post_processor_adds(tmp_path):
    """llama.cpp decides by the kind of split whether a BOS is added, unless the files say it."""
    path = tmp_path / "tokenizer_config.json"
    for post_processor, given, expected in (
        (None, {}, False),
        (None, {"add_bos_token": True}, True),
        (tokenizers.processors.ByteLevel(), {}, None),  # the converter reads that itself
    ):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.post_processor = post_processor
        backend.save(str(tmp_path / "tokenizer.json"))
        path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **given}))
        make_portable(tmp_path)
        assert json.loads(path.read_text()).get("add_bos_token") is expected


def test_a_copy_without_keys_that_may_be_missing_is_completed(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": content["model"]}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    make_portable(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] is False
