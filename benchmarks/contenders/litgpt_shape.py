"""Convert a Hugging Face config to litgpt's: the same matrices and number of parameters."""

from collections.abc import Mapping
from typing import Any

# Its Config has mixtures of experts, but its pretraining counts FLOPs on the meta device, where
# their `torch.where` raises (litgpt 0.5.13, torch 2.13: NotImplementedError of nonzero).
FAMILIES = ("llama", "mistral")
# Keys that litgpt's Config lacks or interprets differently, with the values that are supported.
SUPPORTED = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
}


def litgpt_shape(config: Mapping[str, Any], seq_len: int) -> dict[str, Any]:
    """Return the arguments of `litgpt.Config` for a Hugging Face config.json.

    Raises:
        ValueError: every key with a value that litgpt does not support, one line each.
    """
    kind = config.get("model_type")
    problems = []
    if kind not in FAMILIES:
        problems.append(f"model_type: {kind}, must be one of {', '.join(FAMILIES)}.")
    problems += [
        f"{key}: {config.get(key)!r}, litgpt has no such model. Use another config."
        for key, allowed in SUPPORTED.items()
        if config.get(key) not in allowed
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return {
        "name": f"{kind} of {config['num_hidden_layers']} layers",
        "block_size": seq_len,
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": config["vocab_size"],
        "n_layer": config["num_hidden_layers"],
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_query_groups": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_size": config.get("head_dim"),
        "rotary_percentage": 1.0,
        "rope_base": int(config.get("rope_theta", 10000)),
        "norm_class_name": "RMSNorm",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "parallel_residual": False,
        "bias": False,
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": config["intermediate_size"],
    }
