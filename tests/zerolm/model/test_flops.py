"""Compared with torch.utils.flop_counter on real forward and backward passes."""

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from zerolm.model.architecture import num_parameters, parameter_shapes
from zerolm.model.flops import (
    flops_per_token,
    head_flops_per_token,
    recomputed_flops_per_token,
)

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
        "qk_nope_head_dim": 24,
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


def counted_flops_per_token(config, seq_len, checkpointing=False):
    """Return the counted FLOPs per token of one training step.

    Uses eager attention and eager experts (a loop over the experts), because the counter of torch
    2.13 supports neither fused attention on a CPU nor grouped matrix products.
    """
    routed = any("experts" in name for name in parameter_shapes(config))
    experts = {"experts_implementation": "eager"} if routed else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts)
    if checkpointing:
        old_method = model.gradient_checkpointing_enable  # renamed between 5.17 and 5.23
        getattr(model, "activation_checkpointing_enable", old_method)({"use_reentrant": False})
    ids = torch.randint(0, config.vocab_size, (2, seq_len))
    # With early stop, the last product of a block whose output nobody needs is not recomputed.
    with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_equals_the_flop_counter(family):
    config = make_config(family)
    formula = flops_per_token(config, parameter_shapes(config), seq_len=96)
    assert formula == pytest.approx(counted_flops_per_token(config, 96), rel=0.01)


@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2", "mixtral"])
def test_gradient_checkpointing_recomputes_everything_but_the_head(family):
    config = make_config(family)
    shapes = parameter_shapes(config)
    recomputed = counted_flops_per_token(config, 96, True) - counted_flops_per_token(config, 96)
    assert recomputed_flops_per_token(config, shapes, 96) == pytest.approx(recomputed, rel=0.01)
    assert head_flops_per_token(config, shapes) == 2 * 512 * 128


def test_a_model_without_attention_or_head_has_the_flops_of_its_matrices():
    config = make_config("llama")
    config.num_attention_heads = 0
    shapes = {"model.layers.0.mlp.up_proj.weight": (256, 128), "model.norm.weight": (128,)}
    assert flops_per_token(config, shapes, 96) == 6 * 256 * 128
    assert head_flops_per_token(config, shapes) == 0


def test_the_head_is_the_matrix_with_a_row_for_each_token_id():
    shapes = {
        "model.embed_tokens.weight": (512, 128),
        "model.embed_tokens_per_layer.weight": (512, 48),
        "model.layers.0.mixer.conv1d.weight": (512, 1, 4),
        "model.layers.0.mlp.up_proj.weight": (2048, 128),
    }
    head = {"lm_head.weight": (512, 128)}
    assert head_flops_per_token(make_config("llama"), shapes | head) == 2 * 512 * 128
    assert head_flops_per_token(make_config("llama tied"), shapes) == 2 * 512 * 128


@pytest.mark.parametrize("name", ["tok_embeddings", "token_emb"])
def test_a_tied_matrix_counts_once_as_the_head_whatever_its_name_is(name):
    config = make_config("llama tied")
    config.num_attention_heads = 0
    shapes = {f"model.{name}.weight": (512, 128)}
    assert flops_per_token(config, shapes, 96) == 6 * 512 * 128
    assert head_flops_per_token(config, shapes) == 2 * 512 * 128
    assert recomputed_flops_per_token(config, shapes, 96) == 0


def test_layers_of_other_kinds_attend_to_their_own_number_of_keys():
    """The difference to a model without attention, at 128 values per key and query."""
    kinds = ["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]
    config = make_config("mistral", sliding_window=32)
    config.layer_types, config.attention_chunk_size = kinds, 16
    for seq_len, keys in ((96, 96 + 32 + 16), (8, 3 * 8)):
        assert flops_per_token(config, {}, seq_len) == 6 * 2 * 128 * keys
    config.use_sliding_window = False
    assert flops_per_token(config, {}, 96) == 6 * 2 * 128 * (96 + 96 + 16)
    config.layer_types, config.use_sliding_window = None, True
    assert flops_per_token(config, {}, 96) == 6 * 2 * 128 * 3 * 32


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
