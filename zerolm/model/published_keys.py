"""Keys that a family's published config.json files contain but transformers 5 does not support.

If all published models of a family have the same value, transformers hard-codes it and omits the
key. Readers that support several variants read the value from the file: without the key, some
refuse the file, and others use a default and so run a different model.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Keys = dict[str, Any]

# Numbers of layers for multi-token prediction. transformers does not implement these layers, so an
# export has no weights for them, whatever a published model's file states.
NEXT_TOKENS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS, LINEAR = "sliding_window_pattern", "full_attention_interval"
GROUP = "layer_group_size"
DENSE = "first_k_dense_replace"
OLDER_KINDS = {FULL: "attention", "linear_attention": "mamba"}
INDEXED = {"indexed_attention": FULL}


def published_keys(config: "PretrainedConfig") -> Keys:
    """Return {key: value} for the keys that readers of the family's published files need."""
    keys = {key: 0 for key in NEXT_TOKENS if getattr(config, key, None)}
    if find := FAMILIES.get(config.model_type):
        keys |= find(config)
    return keys


def missing_period(config: "PretrainedConfig") -> str | None:
    """Return the period key if the layers with full attention are not periodic."""
    key = PERIODS.get(config.model_type)
    return None if key is None or key in published_keys(config) else key


def _constant(**keys: Any) -> Callable[[Any], Keys]:
    return lambda config: dict(keys)


def _head_dim(config: Any) -> Keys:
    size = getattr(config, "head_dim", None)
    return {"head_dim": size or config.hidden_size // config.num_attention_heads}


def _period(config: Any) -> int:
    """Return the period of layers with full attention; 0 if they are not periodic."""
    kinds = [kind == FULL for kind in config.layer_types]
    for period in range(1, len(kinds) + 1):
        if kinds == [(number + 1) % period == 0 for number in range(len(kinds))]:
            return period
    return 0


def _windows(config: Any) -> Keys:
    period = _period(config)
    return {WINDOWS: period} if period else {}


def _linear(config: Any) -> Keys:
    period = _period(config)
    return {LINEAR: period} if period else {}


def _exaone4(config: Any) -> Keys:
    """The period is written as "LLLG"; models without windows omit the key."""
    if not config.sliding_window:
        return _head_dim(config) | {WINDOWS: None}
    pattern = {key: "L" * (period - 1) + "G" for key, period in _windows(config).items()}
    return _head_dim(config) | pattern


def _leading_dense(config: Any) -> Keys:
    kinds = [*config.mlp_layer_types, "sparse"]
    return {DENSE: kinds.index("sparse"), "moe_layer_freq": 1}


def _bailing(config: Any) -> Keys:
    """The class does not write the `head_dim` that it reads, and its sizes may differ from the
    layers' sizes.
    """
    period = _period(config)
    return {
        "head_dim": config.linear_head_dim, DENSE: _leading_dense(config)[DENSE],
        "q_lora_rank": None, **({GROUP: period} if period else {}),
        "max_position_embeddings": config.max_position_embeddings, "n_group": config.n_group,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size,
    }  # fmt: skip


def _gemma4(config: Any) -> Keys:
    """transformers stores the sizes of full-attention layers in `per_layer_config`."""
    layers = [
        config.per_layer_config[i] for i, kind in enumerate(config.layer_types) if kind == FULL
    ]
    sizes = {(layer.head_dim, layer.num_key_value_heads) for layer in layers}
    if len(sizes) != 1:
        return {}
    head_dim, heads = sizes.pop()
    return {
        "global_head_dim": head_dim,
        "num_global_key_value_heads": heads if config.attention_k_eq_v else None,
    }


def _kimi_linear(config: Any) -> Keys:
    """Layers are numbered from 1."""
    numbered = [*enumerate(config.layer_types, 1)]
    linear = {
        "full_attn_layers": [number for number, kind in numbered if kind == FULL],
        "kda_layers": [number for number, kind in numbered if kind != FULL],
        "head_dim": config.linear_head_dim, "num_heads": config.linear_num_heads,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
    }  # fmt: skip
    return {
        "linear_attn_config": linear, "mla_use_nope": True, "rope_theta": 10000.0,
        "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, **_leading_dense(config),
    }  # fmt: skip


def _mimo(config: Any) -> Keys:
    full, sliding = (config.rope_parameters[kind] for kind in (FULL, SLIDING))
    return {
        **WITH_BIAS, "n_shared_experts": None, "layernorm_epsilon": config.rms_norm_eps,
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "sliding_window_size": config.sliding_window - 1,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "swa_head_dim": config.head_dim, "swa_v_head_dim": config.v_head_dim,
        "rope_theta": full["rope_theta"], "swa_rope_theta": sliding["rope_theta"],
        "partial_rotary_factor": full.get("partial_rotary_factor", 1.0),
    }  # fmt: skip


def _dots3_note(config: Any) -> Keys:
    """transformers stores the sizes of sliding-window layers in `per_layer_config`."""
    keys = {
        **WITH_BIAS, DENSE: _leading_dense(config)[DENSE], "apply_mla_qkv_lora_rescale": True,
    }  # fmt: skip
    if SLIDING not in config.layer_types:
        return keys
    layer = config.per_layer_config[config.layer_types.index(SLIDING)]
    sizes = (
        "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    )  # fmt: skip
    return {
        **keys, "sliding_window_size": config.sliding_window,
        **{f"swa_{size}": getattr(layer, size) for size in sizes},
    }  # fmt: skip


def _vocab_size(config: Any) -> Keys:
    return {"vocab_size": config.text_config.vocab_size}


def _multiple_queries(config: Any) -> Keys:
    """Falcon-7B has one key head, regardless of the default of `num_kv_heads`."""
    one = config.multi_query and not config.new_decoder_architecture
    return {"num_kv_heads": 1} if one else {}


def _minimax_m2(config: Any) -> Keys:
    share = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return {
        "rotary_dim": int(config.head_dim * share), "shared_intermediate_size": 0,
        "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    }  # fmt: skip


def _kinds(name: str, published: dict[str, str]) -> Callable[[Any], Keys]:
    return lambda config: {name: [published.get(kind, kind) for kind in getattr(config, name)]}


def _bamba(config: Any) -> Keys:
    """transformers rotates half of each head; without this key, readers rotate the whole head."""
    size = config.hidden_size // config.num_attention_heads
    return {"attn_rotary_emb": int(size * config.rope_parameters["partial_rotary_factor"])}


def _mllama(config: Any) -> Keys:
    """transformers 4 fails if the type is missing."""
    default = config.rope_parameters["rope_type"] == "default"
    return {"rope_scaling": {"rope_type": "default"}} if default else {}


def _per_layer(value: Any, num_layers: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * num_layers


def _hunyuan_moe(config: Any) -> Keys:
    return {
        "moe_intermediate_size": _per_layer(config.intermediate_size, config.num_hidden_layers),
        "num_shared_expert": _per_layer(1, config.num_hidden_layers),
        "moe_topk": _per_layer(config.moe_topk, config.num_hidden_layers),
        "use_qk_norm": True,
    }


SIGMOID = {"scoring_func": "sigmoid"}
WITH_BIAS = {**SIGMOID, "topk_method": "noaux_tc"}
# By model type. llama.cpp's converter, mlx-lm, vLLM or transformers 4 reads each of these keys.
FAMILIES: dict[str, Callable[[Any], Keys]] = {
    "apertus": _constant(mlp_bias=False, post_norm=False, qk_norm=True),
    "afmoe": _constant(score_func="sigmoid", route_norm=True),
    "axk1": _constant(**WITH_BIAS),
    "bailing_hybrid": _bailing,
    "bamba": _bamba,
    "cohere2": lambda config: {"rotary_pct": 1.0, **_windows(config)},
    "cohere2_moe": _windows,
    "deepseek_v2": _constant(scoring_func="softmax", moe_layer_freq=1),
    "deepseek_v3": _constant(**WITH_BIAS, moe_layer_freq=1),
    "deepseek_v32": lambda config: {**WITH_BIAS, **_leading_dense(config)},
    "dots1": _constant(**WITH_BIAS, moe_layer_freq=1),
    "dots3_note_text": _dots3_note,
    "exaone4": _exaone4,
    "exaone_moe": lambda config: {
        **_head_dim(config), **WITH_BIAS,
        "is_moe_layer": [kind == "sparse" for kind in config.mlp_layer_types],
    },
    "falcon": _multiple_queries,
    "falcon_h1": _head_dim,
    "fuyu": lambda config: {"hidden_size": config.text_config.hidden_size},
    **dict.fromkeys(("gemma3", "gemma4", "gemma4_unified"), _vocab_size),
    "gemma3_text": _windows,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": lambda config: {
        "hidden_size_per_layer_input": 0, "moe_intermediate_size": None, **_gemma4(config)
    },
    "glm4_moe": lambda config: {**_head_dim(config), **WITH_BIAS},
    "glm4_moe_lite": lambda config: {**WITH_BIAS, DENSE: _leading_dense(config)[DENSE]},
    "glm_moe_dsa": lambda config: {**WITH_BIAS, **_leading_dense(config)},
    "gpt2": lambda config: {"n_ctx": config.n_positions},
    "granitemoehybrid": _kinds("layer_types", OLDER_KINDS),
    "hunyuan_v1_moe": _hunyuan_moe,
    "kimi_linear": _kimi_linear,
    "laguna": _constant(moe_router_score_func="sigmoid"),
    "lfm2": lambda config: {"block_dim": config.hidden_size},
    "longcat_flash": _constant(
        attention_method="MLA", zero_expert_type="identity", mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
    ),
    "mamba2": lambda config: {
        "intermediate_size": int(config.expand * config.hidden_size), "rms_norm": True,
    },
    "mimo_v2_flash": _mimo,
    "minimax_m2": _minimax_m2,
    "mllama_text_model": _mllama,
    "modernbert-decoder": lambda config: {"local_attention": 2 * config.sliding_window},
    "openai-gpt": lambda config: {"n_ctx": config.n_positions},
    "qwen3_5_moe_text": _linear,
    "qwen3_5_text": _linear,
    "qwen3_moe": _head_dim,
    "qwen3_next": _linear,
    "qwen4_exp_text": lambda config: {
        "partial_rotary_factor": config.rope_parameters.get("partial_rotary_factor", 1.0),
        **_kinds("layer_types", INDEXED)(config),
    },
    "solar_open": lambda config: {
        **WITH_BIAS, DENSE: 0, "partial_rotary_factor": 1.0,
        "intermediate_size": config.moe_intermediate_size,
    },
    "zamba": _kinds("layers_block_type", OLDER_KINDS),
    "zamba2": _kinds("layers_block_type", OLDER_KINDS),
}  # fmt: skip
# Families for which some readers use the period instead of `layer_types`, and a default if the
# period is missing.
PERIODS = {
    **dict.fromkeys(("cohere2", "cohere2_moe", "exaone4", "gemma3_text"), WINDOWS),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), LINEAR),
    "bailing_hybrid": GROUP,
}
FAMILIES["gpt-sw3"] = FAMILIES["gpt2"]
