"""Which parameters decay, on real models of transformers, built without memory."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests import tracked
from zerolm.model.architecture import meta_model
from zerolm.model.config_file import load_model_config
from zerolm.optim.parameter_groups import (
    decays,
    describe_groups,
    keeping_options,
    parameter_groups,
)

SHIPPED = tracked("model_configs/*.json")
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# Parameters of two or more dimensions that do not decay: norms, biases, and what the authors of an
# architecture exclude. mamba-ssm marks A_log and D; RWKV-LM decays matrices only.
EXCLUDED = {
    "gpt_oss": (
        {**EXPERTS, "head_dim": 8},
        {"experts.gate_up_proj_bias", "experts.down_proj_bias"},
    ),
    "cohere": ({"use_qk_norm": True}, {"q_norm.weight", "k_norm.weight"}),
    "recurrent_gemma": (
        {"lru_width": 32, "num_hidden_layers": 3, "block_types": ["recurrent", "attention"]},
        {"rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias"},
    ),
    "mamba": ({"state_size": 4}, {"mixer.A_log"}),
    "jamba": ({**EXPERTS, "use_mamba_kernels": False}, {"mamba.A_log"}),
    "zamba": (
        {
            "mamba_d_state": 4, "n_mamba_heads": 2, "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
        },
        {"mamba.A_log", "mamba.D", "mamba.dt_proj_bias"},
    ),
    "rwkv": (
        {"attention_hidden_size": 32},
        {
            "attention.time_mix_key", "attention.time_mix_value", "attention.time_mix_receptance",
            "feed_forward.time_mix_key", "feed_forward.time_mix_receptance",
        },
    ),
}  # fmt: skip
FROZEN = {
    "afmoe": ({**EXPERTS, "num_dense_layers": 1, "moe_intermediate_size": 24}, "mlp.expert_bias"),
    "ernie4_5_moe": (
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
        "moe_statics.e_score_correction_bias",
    ),
    "laguna": (
        {**EXPERTS, "moe_intermediate_size": 24, "head_dim": 8},
        "gate.e_score_correction_bias",
    ),
    "hrm_text": ({}, "model.z_L_init"),
}  # fmt: skip


def model_of(family, changes):
    return meta_model(AutoConfig.for_model(family, **{**SMALL, **changes}))


def kind(name):
    return ".".join([part for part in name.split(".") if not part.isdigit()][-2:])


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_in_shipped_models_exactly_the_matrices_decay(file: Path):
    model = meta_model(load_model_config(file))
    for name, parameter in model.named_parameters():
        assert decays(model, name) == (parameter.ndim >= 2), name


@pytest.mark.parametrize("family", EXCLUDED)
def test_norms_biases_and_what_the_authors_exclude_do_not_decay_in_any_shape(family):
    changes, excluded = EXCLUDED[family]
    model = model_of(family, changes)
    several = [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]
    assert {kind(name) for name in several if not decays(model, name)} == excluded


@pytest.mark.parametrize("family", FROZEN)
def test_frozen_parameters_are_in_no_group(family):
    changes, frozen = FROZEN[family]
    model = model_of(family, changes)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grouped = [each for group in parameter_groups(model, 0.1) for each in group["params"]]
    assert {id(each) for each in grouped} == {id(each) for each in trainable}
    held = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert held and all(name.endswith(frozen) for name in held)
    assert f"; frozen: {len(held)} tensors with " in describe_groups(model, 0.1)


def test_a_model_of_frozen_norms_has_one_group():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    model[1].requires_grad_(False)
    [group] = parameter_groups(model, 0.1)
    assert group["weight_decay"] == 0.1 and group["params"] == [model[0].weight]


def test_what_does_not_decay_has_a_group_with_weight_decay_0():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    assert [group["weight_decay"] for group in parameter_groups(model, 0.1)] == [0.1, 0.0]


def test_the_original_shape_of_a_partitioned_parameter_counts():
    model = nn.Linear(4, 4)
    for parameter, shape in ((model.weight, (4, 4)), (model.bias, (4,))):
        parameter.data = torch.zeros(2)  # as ZeRO-3 leaves it
        parameter.ds_shape = torch.Size(shape)
    assert decays(model, "weight") and not decays(model, "bias")


def test_outside_of_known_modules_a_vector_in_the_shape_of_a_matrix_does_not_decay():
    model = nn.Module()
    model.mixer = nn.Parameter(torch.zeros(4, 4))
    model.scale = nn.Parameter(torch.zeros(1, 1, 4))
    assert decays(model, "mixer") and not decays(model, "scale")


@pytest.mark.parametrize(("norms", "more"), [(6, ""), (7, ", and 2 more")])
def test_at_most_twelve_kinds_of_parameters_are_named(norms, more):
    model = nn.ModuleDict({f"norm_{number}": nn.LayerNorm(4) for number in range(norms)})
    kinds = [f"norm_{number}.{leaf}" for number in range(6) for leaf in ("weight", "bias")]
    line = describe_groups(model, 0.1)
    assert line.endswith(f"{2 * norms} tensors with {8 * norms} values ({', '.join(kinds)}{more})")


def test_a_group_without_parameters_is_described_by_zeros():
    line = describe_groups(torch.nn.Linear(2, 3, bias=False), 0.1)
    assert line == "weight decay 0.1: 1 tensors with 6 values; none: 0 tensors with 0 values"


def test_the_groups_are_described_in_one_line():
    config = AutoConfig.for_model("llama", **SMALL)
    model = AutoModelForCausalLM.from_config(config)
    matrices = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert describe_groups(model, 0.1) == (
        f"weight decay 0.1: 16 tensors with {matrices:,} values; none: 5 tensors with 160 values "
        f"(input_layernorm.weight, post_attention_layernorm.weight, norm.weight)"
    )


def test_loaded_states_leave_the_options_of_the_run_as_they_are() -> None:
    def optimizer(decay: float, momentum: float, steps: int) -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.zeros(2))], "weight_decay": each, "steps": steps}
                  for each in (decay, 0.0)]  # fmt: skip
        return torch.optim.SGD(groups, lr=0.5, momentum=momentum)

    saved, ours = optimizer(0.1, 0.9, steps=7), optimizer(0.3, 0.8, steps=0)
    with keeping_options(ours, {"weight_decay", "momentum", "absent"}):
        ours.load_state_dict(saved.state_dict())
    assert [group["weight_decay"] for group in ours.param_groups] == [0.3, 0.0]
    assert [group["momentum"] for group in ours.param_groups] == [0.8, 0.8]
    assert ours.param_groups[0]["steps"] == 7, "a state, which is that of the checkpoint"
