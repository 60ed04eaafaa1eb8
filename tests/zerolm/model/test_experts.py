"""Modules of divided experts on one rank; tests/end_to_end/test_expert_parallel.py has several."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.launching import LLAMA
from zerolm.engine.experts import divided_parameters
from zerolm.engine.parameters import full_shape, num_values
from zerolm.model.architecture import meta_model
from zerolm.model.experts import divide, expert_modules, expert_parameters
from zerolm.optim.parameter_groups import parameter_groups
from zerolm.watchdog import limits

QWEN3 = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "mlp_only_layers": [0],
}  # fmt: skip


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3))


def test_experts_are_the_fused_tensors_of_the_layers_that_have_them(model):
    assert list(expert_modules(model)) == ["model.layers.1.mlp.experts"]
    names = expert_parameters(meta_model(AutoConfig.for_model(**QWEN3)))
    assert names == [f"model.layers.1.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")]
    assert not expert_modules(AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)))


def test_a_divided_parameter_keeps_its_name_and_is_in_a_group_of_its_own(model):
    shapes = {name: each.shape for name, each in model.named_parameters()}
    divide(model, 4)
    divided = divided_parameters(model)
    assert [*divided] == expert_parameters(model)
    assert {name: full_shape(each) for name, each in model.named_parameters()} == shapes
    assert all(4 * each.numel() == num_values(each) for each in divided.values())
    groups = parameter_groups(model, 0.1)
    [own] = [each for each in groups if each.get("moe")]
    assert own["name"] == "ep_size_4" and own["weight_decay"] == 0.1
    assert list(map(id, own["params"])) == list(map(id, divided.values()))
    assert sum(len(each["params"]) for each in groups) == len(shapes)


def test_memory_that_routing_exceeds_is_explained_by_the_tokens(model):
    rows = []

    def exchange(sent: torch.Tensor, *numbers: list[int]) -> torch.Tensor:
        rows.append(len(sent))
        if len(rows) == 1:  # counts: everything comes to this rank
            return torch.full_like(sent, 100)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    divide(model, 2, exchange)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(input_ids=torch.ones(1, 10, dtype=torch.long), use_cache=False)
    text = limits.explain(raised.value) or ""
    assert "this rank's experts got 800 tokens of 200 KiB, 40.00 times as many as its own" in text
    assert text.startswith("CUDA out of memory. Tried to allocate 20.00 GiB. In a layer")
    assert "Lower --micro_batch_size" in text
