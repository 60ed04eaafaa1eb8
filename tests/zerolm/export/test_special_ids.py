"""The ids that an export sets in a config, for each kind of class."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerolm.export.export import set_special_ids

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
