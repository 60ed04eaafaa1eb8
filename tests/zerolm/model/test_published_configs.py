"""Published config.json files, shortened to what differs from the defaults of their classes.

Compared with the number of parameters that the authors state.
"""

import json

import pytest

from zerolm.model.model import Model

QWEN3_30B = {
    "model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
    "max_window_layers": 48, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "rope_theta": 1e6,
    "num_key_value_heads": 4, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
GLM_45_AIR = {
    "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "vocab_size": 151552,
    "torch_dtype": "bfloat16", "use_qk_norm": False,
}  # fmt: skip
EXAONE_4_32B = {
    "model_type": "exaone4", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27392,
    "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
    "sliding_window": 4096, "sliding_window_pattern": "LLLG", "vocab_size": 102400,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16, "rope_theta": 1000000,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
    "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "quantization_config": {"quant_method": "fp8"}, "vocab_size": 129280,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32,
    "experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
    "vocab_size": 100352, "tie_word_embeddings": False,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000, "model_type": ""},
    "ffn_config": {
        "ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 10752, "moe_jitter_eps": 0,
        "moe_normalize_expert_weights": 1, "moe_num_experts": 16, "moe_top_k": 4, "model_type": "",
    },
}  # fmt: skip
MPT_7B = {
    "model_type": "mpt", "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"},
    "attn_config": {"alibi": True, "attn_pdrop": 0, "prefix_lm": False}, "d_model": 4096,
    "init_config": {"init_std": 0.02}, "max_seq_len": 2048, "n_heads": 32, "n_layers": 32,
    "tokenizer_name": "EleutherAI/gpt-neox-20b", "verbose": 0, "vocab_size": 50432,
}  # fmt: skip
FALCON_40B = {
    "model_type": "falcon", "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
    "hidden_size": 8192, "multi_query": True, "new_decoder_architecture": True,
    "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
}  # fmt: skip
BLOOM_560M = {
    "model_type": "bloom", "hidden_size": 1024, "n_head": 16, "n_layer": 24, "offset_alibi": 100,
    "masked_softmax_fusion": True, "skip_bias_add": True, "unk_token_id": 0, "vocab_size": 250880,
}  # fmt: skip
JAMBA_MINI = {
    "model_type": "jamba", "num_logits_to_keep": 1, "mamba_dt_rank": 256, "mamba_proj_bias": False,
    "num_experts": 16, "num_hidden_layers": 32, "vocab_size": 65536,
}  # fmt: skip

PYTHIA_12B = {
    "model_type": "gpt_neox", "hidden_size": 5120, "intermediate_size": 20480, "vocab_size": 50688,
    "num_attention_heads": 40, "num_hidden_layers": 36, "rotary_pct": 0.25,
}  # fmt: skip
BLOOM = {
    "model_type": "bloom", "hidden_size": 14336, "n_head": 112, "n_layer": 70, "vocab_size": 250880,
}  # fmt: skip
STABLELM_3B = {
    "model_type": "stablelm", "hidden_size": 2560, "intermediate_size": 6912, "vocab_size": 50304,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
}  # fmt: skip

# Stated to the last digit by the model cards.
STATED_EXACTLY = {
    "Pythia-12B": (PYTHIA_12B, 11_846_072_320),
    "BLOOM": (BLOOM, 176_247_271_424),
    "StableLM-3B-4E1T": (STABLELM_3B, 2_795_443_200),
}
# Total and active parameters as the model cards and papers state them.
STATED = {
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5e9, 3.3e9),
    "GLM-4.5-Air": (GLM_45_AIR, 106e9, None),
    "EXAONE-4.0-32B": (EXAONE_4_32B, 32.0e9, None),
    "DeepSeek-V3": (DEEPSEEK_V3, 671e9, 37e9),
    "gpt-oss-20b": (GPT_OSS_20B, 20.9e9, None),
    "DBRX": (DBRX, 132e9, 36e9),
    "MPT-7B": (MPT_7B, 6.7e9, None),
    "Falcon-40B": (FALCON_40B, 41.3e9, None),
    "BLOOM-560m": (BLOOM_560M, 559_214_592, None),
    "Jamba": (JAMBA_MINI, 52e9, 12e9),
}


@pytest.mark.parametrize("name", STATED)
def test_published_configs_have_the_stated_numbers_of_parameters(tmp_path, name):
    values, total, active = STATED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = Model.load(str(tmp_path))
    assert model.num_parameters == pytest.approx(total, rel=0.01)
    if active is not None:
        assert model.num_active_parameters == pytest.approx(active, rel=0.02)
    assert len(model.notices) <= 1


@pytest.mark.parametrize("name", STATED_EXACTLY)
def test_published_configs_have_exactly_the_stated_numbers_of_parameters(tmp_path, name):
    values, total = STATED_EXACTLY[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert Model.load(str(tmp_path)).num_parameters == total
