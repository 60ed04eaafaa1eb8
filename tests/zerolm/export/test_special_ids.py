"""The ids that an export sets in a config, for each kind of class."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from tests.model_families.toy_configs import toy_config
from zerolm.export.generation import (
    FORCED,
    position_notices,
    set_special_ids,
    with_values_of,
    zeroes_padding_row,
)

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48,
}  # fmt: skip
DECODER = {"is_decoder": True, "pad_token_id": 1, "bos_token_id": 0}
BEGIN = {
    "llama": ({"bos_token_id": 1}, None),
    "gpt2": ({}, None),
    "roberta": (DECODER, None),
    "camembert": (DECODER, None),
    "xlm-roberta": (DECODER, None),
    "cwm": (
        {"bos_token_id": 5, "num_key_value_heads": 4, "head_dim": 8},
        5,
    ),  # its class accepts only a number
    "modernbert-decoder": ({"pad_token_id": 3, "bos_token_id": 5, "cls_token_id": 5}, 5),
}


@pytest.mark.parametrize("family", BEGIN)
def test_an_exported_config_has_the_ids_of_the_run_and_gives_the_same_logits(family, tmp_path):
    changes, begin = BEGIN[family]
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    pad = config.pad_token_id
    ids = torch.arange(4, 20)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    set_special_ids(config, 7)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (7, begin, pad)
    exported = AutoModelForCausalLM.from_config(config).eval()
    exported.load_state_dict(model.state_dict())
    exported.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=ids, use_cache=False).logits, expected)


SPECIAL = ("<s>", "<|eot|>", "<pad>")  # with the ids 1, 2 and 3; the EOS token has 0
SOURCES = {  # of --init_from: expected BOS and EOS, and the ids that a line names
    "none": (None, None, 0, []),
    "same": ({"eos_token_id": 0}, None, 0, []),
    "list": ({"bos_token_id": 1, "eos_token_id": [0, 2]}, 1, [0, 2], []),
    "other": ({"bos_token_id": None, "eos_token_id": 2}, None, [0, 2], []),
    "ordinary": ({"bos_token_id": 70, "eos_token_id": [65, 2]}, None, [0, 2], [65, 70]),
    "outside": ({"eos_token_id": [0, 900]}, None, 0, [900]),
}


@pytest.mark.parametrize("bos_token", [None, "<pad>"])
@pytest.mark.parametrize("name", SOURCES)
def test_ids_of_the_source_are_kept_if_the_tokenizer_has_them(name, bos_token, tmp_path):
    source, bos_id, eos_ids, left_out = SOURCES[name]
    train_bpe(["text"] * 9, BpeOptions(270, special_tokens=SPECIAL), tmp_path, progress=False)
    if bos_token:
        file = tmp_path / "tokenizer_config.json"
        file.write_text(file.read_text().replace("{", '{"bos_token": "<pad>",', 1))
        if name == "list":
            left_out = [1]
        bos_id = 3
    config = AutoConfig.for_model("llama", **SIZES, bos_token_id=1, eos_token_id=2)
    lines = set_special_ids(config, 0, tmp_path, source)
    assert (config.bos_token_id, config.eos_token_id) == (bos_id, eos_ids)
    assert len(lines) == len(left_out)
    assert all(any(f"_token_id {each} of" in line for line in lines) for each in left_out)


def test_values_of_generation_come_from_the_source_and_ids_from_the_export(tmp_path):
    ours = GenerationConfig(bos_token_id=None, eos_token_id=[0, 2])
    source = {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 3, "do_sample": True}
    source |= {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 7}
    merged, lines = with_values_of(source, ours)
    merged.save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    expected = {**source, "bos_token_id": None, "eos_token_id": [0, 2]}
    assert not lines and {key: getattr(read, key) for key in expected} == expected
    unchanged, [line] = with_values_of({**source, "do_sample": False, "temperature": -1.0}, ours)
    assert unchanged is ours and "left out" in line


@pytest.mark.parametrize("family", ["llama", "gemma", "youtu", "xlstm"])
def test_a_trained_row_of_the_padding_token_is_loaded_as_it_is(family, tmp_path):
    config = AutoConfig.for_model(**toy_config(family) | {"pad_token_id": 2})
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    if zeroes_padding_row(model):
        model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bool((loaded.get_input_embeddings().weight == 1).all())
    assert (loaded.config.pad_token_id == 2) == (family != "youtu")


@pytest.mark.parametrize("family", ["bart", "whisper", "llama4", "mllama", "gemma3", "qwen3_5"])
def test_generation_has_no_default_ids_of_a_class(family):
    """They are ordinary tokens of the run's tokenizer. Some are in the text part of a config."""
    config = AutoConfig.for_model(**toy_config(family))
    set_special_ids(config, 7)
    with torch.device("meta"):
        generation = AutoModelForCausalLM.from_config(config).generation_config
    begin = {"mllama": 1}.get(family)  # its class accepts only a number
    assert (generation.eos_token_id, generation.bos_token_id) == (7, begin)
    assert not any(getattr(generation, key, None) for key in FORCED)


def test_an_export_says_which_positions_generate_needs():
    ids = torch.arange(4, 12)[None]
    for family in ("bert", "roberta"):
        config = AutoConfig.for_model(**toy_config(family))
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        best = int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax())
        (line,) = position_notices(model) or ("position_ids=None",)
        given = eval(line.partition("position_ids=")[2], {"torch": torch, "input_ids": ids})
        found = model.generate(ids, max_new_tokens=1, do_sample=False, position_ids=given)
        assert (int(found[0, -1]), bool(position_notices(model))) == (best, family == "roberta")
