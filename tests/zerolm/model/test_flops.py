"""Compared with torch.utils.flop_counter on real forward and backward passes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from zerolm.model.architecture import num_parameters, parameter_shapes
from zerolm.model.flops import flops_per_token, peak_flops_per_second

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": {"intermediate_size": 256},
    "llama grouped": {"intermediate_size": 256, "num_key_value_heads": 2},
    "llama tied": {"intermediate_size": 256, "tie_word_embeddings": True},
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 512},
    "qwen3": {"intermediate_size": 256, "head_dim": 48, "num_key_value_heads": 2},
    "mistral": {"intermediate_size": 256, "num_key_value_heads": 1, "sliding_window": 4096},
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_key_value_heads": 2},
    "olmoe": {
        "intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
    },
    "qwen2_moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    },
    "deepseek_v3": {
        "intermediate_size": 128,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "topk_group": 1,
        "v_head_dim": 24,
    },
    "phi": {"intermediate_size": 256},
    "gemma2": {"intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 2},
    # Layers with full attention have another head dimension.
    "gemma4_unified_text": {
        "intermediate_size": 256,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "pad_token_id": 0,
    },
}


def make_config(family, **changes):
    return AutoConfig.for_model(family.split()[0], **{**COMMON, **FAMILIES[family], **changes})


def counted_flops_per_token(config, seq_len):
    """Return the counted FLOPs per token of one training step.

    Uses eager attention and eager experts (a loop over the experts), because the counter of torch
    2.13 supports neither fused attention on a CPU nor grouped matrix products.
    """
    routed = any("experts" in name for name in parameter_shapes(config))
    experts = {"experts_implementation": "eager"} if routed else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts)
    ids = torch.randint(0, config.vocab_size, (2, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_equals_the_flop_counter(family):
    config = make_config(family)
    formula = flops_per_token(config, parameter_shapes(config), seq_len=96)
    assert formula == pytest.approx(counted_flops_per_token(config, 96), rel=0.01)


def test_a_window_limits_the_counted_attention():
    narrow, wide = make_config("mistral", sliding_window=32), make_config("mistral")
    shapes = parameter_shapes(wide)
    assert flops_per_token(narrow, shapes, 96) < flops_per_token(wide, shapes, 96)
    attention = flops_per_token(wide, shapes, 96) - flops_per_token(wide, shapes, 32)
    saved = flops_per_token(wide, shapes, 96) - flops_per_token(narrow, shapes, 96)
    assert saved == attention


def test_the_formula_approaches_six_flops_per_parameter():
    config = AutoConfig.for_model("llama")  # 7B, where attention and lookups are small
    shapes = parameter_shapes(config)
    assert flops_per_token(config, shapes, 1) == pytest.approx(6 * num_parameters(shapes), rel=0.03)


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("AMD Instinct MI250X", "tf32", None),
        ("Tesla T4", "tf32", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("AMD EPYC", "bf16", None),
    ],
)
def test_peaks_equal_those_of_the_datasheets(device, dtype, teraflops):
    peak = peak_flops_per_second(device, dtype)
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))
