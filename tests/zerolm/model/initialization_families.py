"""Small configs of the tested model families, and reference initial weights."""

import copy
import hashlib
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SEED = 1234
COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": {"model_type": "llama", "intermediate_size": 48, "num_key_value_heads": 2},
    "llama-tied-padded": {
        "model_type": "llama",
        "intermediate_size": 48,
        "tie_word_embeddings": True,
        "pad_token_id": 3,
    },
    "gpt2": {"model_type": "gpt2", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "mixtral": {
        "model_type": "mixtral",
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_key_value_heads": 2,
    },
    "qwen3": {
        "model_type": "qwen3",
        "intermediate_size": 48,
        "head_dim": 16,
        "num_key_value_heads": 2,
    },
    "gpt_neox": {"model_type": "gpt_neox", "intermediate_size": 48},
    "olmoe": {
        "model_type": "olmoe",
        "intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "pad_token_id": 1,
    },
    # Two without a closed form: norms that start at zero, and a state space model.
    "gemma2": {
        "model_type": "gemma2",
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "mamba": {"model_type": "mamba", "state_size": 4},
    # `trunc_normal_`, which does not write to meta tensors, in the modules around the matrices.
    "modernbert-decoder": {
        "model_type": "modernbert-decoder",
        "intermediate_size": 48,
        "local_attention": 16,
        **dict.fromkeys(("bos_token_id", "cls_token_id", "pad_token_id"), 1),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    },
    # The slopes of the activation have no value but that of the constructor.
    "apertus": {"model_type": "apertus", "intermediate_size": 48, "num_key_value_heads": 2},
}
FLOAT32_ROUTERS = {  # which the class makes so, whatever the precision
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "num_key_value_heads": 2,
    },
}


def family_config(family):
    return AutoConfig.for_model(**COMMON | (FAMILIES | FLOAT32_ROUTERS)[family])


def plain_weights(config, seed, dtype):
    """The algorithm of docs/initialization.md, with torch and transformers only."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings, tied = False, config.tie_word_embeddings
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, module in reversed(list(model.named_modules())):
            if hasattr(module, "padding_idx"):
                module.padding_idx = None
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:4], "little"))
            model._init_weights(module)
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    return {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}


def sha256_of(tensor):
    return hashlib.sha256(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def write_result(path, result):
    Path(path).write_text(json.dumps(result))
