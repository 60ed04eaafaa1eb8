"""Safetensors files written block by block equal those of `save_pretrained`."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model_families.toy_configs import toy_config
from tests.zerolm.model.initialization_families import FAMILIES, family_config
from zerolm.common.errors import ConfigError
from zerolm.export import weights
from zerolm.export.export import load_exported


def contents(directory) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_files_equal_those_of_save_pretrained(family, dtype, tmp_path):
    config = family_config(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    skeleton.tie_weights()
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    releases = []
    size = weights.write_weights(
        skeleton, state.__getitem__, lambda: releases.append(1), ours, dtype, 20_000
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(theirs, max_shard_size=20_000)
    found, expected = contents(ours), contents(theirs)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert size == sum(tensor.nbytes for tensor in expected.values())
    assert len(releases) > config.num_hidden_layers, "one block at a time"
    index = json.loads((ours / weights.INDEX).read_text())
    assert index["metadata"]["total_size"] == size
    for name, file in index["weight_map"].items():
        with safe_open(ours / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    if family not in ("mixtral", "olmoe"):  # their experts are views, which Hugging Face miscounts
        assert index == json.loads((theirs / weights.INDEX).read_text())


def test_weights_that_depend_on_several_blocks_are_converted_at_once(monkeypatch):
    """If converting block by block gives other names, all weights are one block."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(family_config("llama"))
    meta = skeleton.state_dict()
    apart = list(weights._blocks(skeleton, meta, list(meta)))
    assert len(apart) == 2 + 3 and [n for names in apart for n in names] == sorted(
        meta, key=[n for names in apart for n in names].index
    )
    assert list(weights._blocks(skeleton, meta, ["made of all"])) == [list(meta)]


@pytest.mark.parametrize(
    ("family", "name", "other"),
    [("kimi_linear", "layers.0.mlp.up_proj", "layers.1.block_sparse_moe.shared_experts.up_proj"),
     ("bailing_hybrid", "layers.0.attention.o_proj", "layers.2.attention.dense"),
     ("hy_v4", "layers.0.mlp.gate_proj", "layers.1.self_attn.linear_gate")],
)  # fmt: skip
def test_names_that_transformers_writes_for_layers_of_other_kinds(family, name, other, tmp_path):
    config = AutoConfig.for_model(**toy_config(family))
    model = AutoModelForCausalLM.from_config(config).eval()
    state = model.state_dict()
    config.save_pretrained(tmp_path)
    weights.write_weights(model, state.__getitem__, lambda: None, tmp_path, torch.float32, 10**9)
    found = contents(tmp_path).keys()
    assert {f"model.{name}.weight", f"model.{other}.weight"} <= found
    if family == "hy_v4":
        streams = {"model.hc_head.hc_head_fn", "model.layers.0.hc_attn_layer.hc_pre.hc_fn"}
        assert streams <= found
        assert not [key for key in found if ".hc_pre.hc_" in key and "_layer.hc_pre." not in key]
    loaded = load_exported(tmp_path).state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.parametrize("weight", [torch.ones(1), torch.ones(3, 2), torch.tensor(1.0), "text"])
def test_a_weight_of_another_shape_is_refused_and_not_repeated(weight):
    expected = torch.empty(2, 3, dtype=torch.bfloat16)
    assert weights.fitting("w", torch.ones(2, 3), expected).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"w: has .*, but .* implies \[2, 3\]"):
        weights.fitting("w", weight, expected)
