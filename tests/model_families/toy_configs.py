"""Model configs of a few thousand parameters for every causal language model of transformers.

A toy config is the default of the family's config class with small sizes under the names that
transformers uses. Of lists with an entry for each layer it keeps the first layer of each kind, so
that hybrids keep their kinds. `SPECIAL` has what a family needs besides.
"""

import json
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 512
EOS = 2
FIRST_TEXT_TOKEN = 8  # special tokens are below
SEQ_LEN = 32

# {size: keys of transformers' configs that get it}
KEYS = {
    VOCABULARY: """
        vocab_size
    """,
    128: """
        intermediate_size ffn_dim d_ff dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim
        ffn_hidden_size mlp_dim intermediate_size_mlp dense_intermediate_size feed_forward_size
    """,
    64: """
        hidden_size d_model n_embd dim hidden_size_global embedding_size word_embed_proj_dim
        lru_width backbone_hidden_size input_embedding_size output_embedding_size emb_dim
        embedding_dim max_position_embeddings n_positions n_ctx max_seq_len context_length
        max_target_positions model_max_length max_source_positions adapter_in_dim adapter_out_dim
        adapter_input_size
    """,
    32: """
        moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size
        shared_intermediate_size moe_shared_expert_intermediate_size
        shared_experts_intermediate_size original_max_position_embeddings mamba_d_head
        mamba_head_dim mamba_headdim
    """,
    24: """
        qk_head_dim
    """,
    16: """
        head_dim dim_head d_head d_kv swa_head_dim kv_channels attention_head_size
        attention_head_dim query_pre_attn_scalar q_lora_rank kv_lora_rank o_lora_rank
        qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim linear_value_head_dim
        linear_head_dim
    """,
    8: """
        qk_rope_head_dim rotary_dim index_topk sliding_window sliding_window_size window_size
        local_attention attention_chunk_size attention_window_size state_size
        mamba_d_state ssm_state_size d_state chunk_size mamba_chunk_size
    """,
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads
        encoder_attention_heads attention_heads num_encoder_attention_heads
        num_decoder_attention_heads swa_num_attention_heads index_n_heads num_experts
        num_local_experts n_routed_experts moe_num_experts time_step_rank mamba_dt_rank
        linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads
    """,
    2: """
        num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers
        num_decoder_layers num_encoder_layers num_layers_per_stack depth num_key_value_heads
        swa_num_key_value_heads num_kv_heads o_groups num_experts_per_tok num_experts_per_token
        moe_topk moe_k linear_num_key_heads
    """,
    1: """
        n_group topk_group num_expert_group num_shared_experts n_shared_experts
        moe_num_shared_experts n_groups mamba_n_groups mamba_ngroups
    """,
}  # fmt: skip
SIZES = {key: size for size, keys in KEYS.items() for key in keys.split()}
DERIVED = frozenset({"head_dim", "num_key_value_heads"})  # null means a value from other sizes
LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # multi-head latent attention

DECODERS = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False}

SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {
        "num_hidden_layers": 2, "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"], "head_dim": 24, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [128] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16,
        "per_layer_config": {"1": {"head_dim": 32}},
    },
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 0}},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"head_dim": 32},
    "moshi": {"audio_vocab_size": 32, "ffn_dim": 128},
    "qwen4_exp_text": {
        "hc_lowrank": 16, "ple_embed_dim": 16, "ngram_vocab_size_base": 64, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local"] * 2,
        "local_attn_chunk_length": 8,
    },
    "roc_bert": {
        "shape_vocab_size": 64, "pronunciation_vocab_size": 64, "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "num_key_value_heads": 4, "num_query_groups": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
SPECIAL |= {
    name: {"text_config": SPECIAL[f"{name}_text"]}
    for name in ("dots3_note", "gemma3n", "gemma4", "qwen4_exp")
}


# What a config class needs besides its defaults
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    }
}


def toy_config(model_type: str) -> dict[str, Any]:
    """Return the config.json of a small model of a family."""
    config_class: Any = CONFIG_MAPPING[model_type]
    values = _small(config_class, SPECIAL.get(model_type, {}))
    return json.loads(config_class(**values).to_json_string())


def _small(config_class: Any, special: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a config class that make a small model."""
    default = config_class(**NEEDED.get(config_class.model_type, {}))
    known = default.to_dict()
    latent = "kv_lora_rank" in known
    values: dict[str, Any] = {}
    for key, value in known.items():
        part = vars(default).get(key)
        if isinstance(part, PreTrainedConfig):
            values[key] = _small(type(part), special.get(key, {}))
        elif key in DECODERS and isinstance(value, bool):
            values[key] = DECODERS[key]
        elif key == "output_router_logits":
            values[key] = True
        elif isinstance(value, float) and "drop" in key:
            values[key] = 0.0
        elif key.endswith("_token_id"):
            values |= _token(key, value)
        elif latent and key in LATENT:
            values[key] = LATENT[key]
        elif key in SIZES and (type(value) is int or (value is None and key in DERIVED)):
            values[key] = SIZES[key]
    values |= _layers(known)
    sub_configs = {key for key, value in values.items() if isinstance(value, dict)}
    return values | {key: value for key, value in special.items() if key not in sub_configs}


def _token(key: str, value: Any) -> dict[str, Any]:
    """Return a special token inside the vocabulary, but not in the text."""
    if key == "eos_token_id" and value is not None:
        return {key: EOS}
    if isinstance(value, int) and not 0 <= value < FIRST_TEXT_TOKEN:
        return {key: {"bos_token_id": 1, "pad_token_id": 3}.get(key, 4)}
    return {}


def _layers(known: dict[str, Any]) -> dict[str, Any]:
    """Return lists with an entry per layer, and their length, for the first layer of each kind."""
    depth = known.get("num_hidden_layers")
    if not isinstance(depth, int) or depth <= 2:
        return {}
    lists = {
        key: value
        for key, value in known.items()
        if isinstance(value, list) and len(value) == depth and len(set(map(str, value))) < depth
    }
    kept = {value.index(kind) for value in lists.values() for kind in value}
    for layer in range(depth):
        if len(kept) < 2:
            kept.add(layer)
    chosen = sorted(kept)
    small = {key: [value[layer] for layer in chosen] for key, value in lists.items()}
    return {"num_hidden_layers": len(chosen), **small} if small else {}
