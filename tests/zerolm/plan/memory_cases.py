"""The engines that memory_worker.py builds and test_memory.py predicts."""

from collections.abc import Iterator
from typing import Any

from transformers import LlamaConfig, MixtralConfig

VOCABULARY, SEQ_LEN = 2048, 16
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": LlamaConfig(**_SIZES),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
}
# Stage, offload, precision and gradient_accumulation_steps. The first `SHIPPED` are shipped.
PROFILES = (
    (1, "none", "bf16+fp32", 2),
    (2, "none", "bf16+fp32", 2),
    (2, "optimizer", "bf16+fp32", 2),
    (3, "none", "bf16+fp32", 2),
    (3, "both", "bf16+fp32", 2),
    (1, "none", "bf16", 2),
    (1, "none", "bf16+fp32 later", 2),
    (1, "optimizer", "bf16+fp32", 2),
    (2, "none", "fp32", 1),
    (2, "optimizer", "bf16", 1),
    (3, "optimizer", "bf16", 1),
    (3, "none", "fp32", 2),
    (2, "none", "bf16 states", 2),
    (3, "none", "bf16 states", 2),
    (2, "optimizer", "bf16 states", 2),
    (3, "optimizer", "bf16 states", 1),
    (2, "optimizer", "bf16 masters", 2),
    (3, "both", "bf16 masters", 2),
)
SHIPPED = 5
# Optimizers with other states than AdamW, and the same.
OTHERS = (
    ("Muon", 1, "none", "bf16+fp32", 2),
    ("Muon", 2, "none", "bf16+fp32", 2),
    ("Muon", 2, "none", "fp32", 2),
    ("Muon", 2, "optimizer", "bf16+fp32", 2),
    ("Muon", 3, "none", "bf16+fp32", 2),
    ("Lion", 2, "optimizer", "bf16+fp32", 2),
    ("Lion", 3, "optimizer", "bf16+fp32", 2),
)


def cases(world_size: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, model, DeepSpeed config).

    Llama with all profiles, Mixtral with the shipped ones, Llama with other optimizers and hpZ.
    """
    for model in MODELS:
        for profile in PROFILES if model == "llama" else PROFILES[:SHIPPED]:
            stage, offload, precision, accumulation = profile
            ds = config(stage, offload, precision, accumulation, world_size)
            yield f"{model} ZeRO-{stage} {offload} {precision} x{accumulation}", model, ds
    for kind, *profile in OTHERS:
        ds = config(*profile, world_size)
        ds["optimizer"] = {"type": kind, "params": {"lr": 1e-3}}
        if kind == "Muon":
            ds["optimizer"]["params"]["torch_adam"] = profile[1] == "none"
            ds["gradient_clipping"] = 0.0
            ds["zero_optimization"]["reduce_scatter"] = profile[0] != 3
        yield f"llama {kind} ZeRO-{' '.join(map(str, profile))}", "llama", ds
    if world_size > 1:
        ds = config(3, "none", "bf16+fp32", 2, world_size)
        ds["zero_optimization"] |= {"zero_hpz_partition_size": 2, "stage3_max_live_parameters": 0}
        yield "llama ZeRO-3 hpZ", "llama", ds


def config(
    stage: int, offload: str, precision: str, accumulation: int, world_size: int
) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": 100_000,
        "allgather_bucket_size": 100_000,
        "stage3_param_persistence_threshold": 500,
    }
    ds: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": accumulation * world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": offload == "none"}},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if precision.startswith("bf16"):
        ds["bf16"] = {"enabled": True}
    if precision in ("bf16 masters", "bf16 states"):
        ds["bf16"]["bf16_master_weights_and_grads"] = True
        ds["bf16"]["bf16_optimizer_states"] = precision == "bf16 states"
    if precision.startswith("bf16+fp32"):
        ds["bf16"]["immediate_grad_update"] = precision == "bf16+fp32"
        ds["data_types"] = {"grad_accum_dtype": "fp32"}
        ds["communication_data_type"] = "fp32"
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "both":
        zero["offload_param"] = {"device": "cpu"}
    return ds
