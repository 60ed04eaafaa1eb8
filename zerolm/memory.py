"""What a rank needs in memory, and the largest micro-batch that fits. Estimates, printed as such.

Knows the model by its config and shapes, and the ZeRO profile; the formulas are in defaults.py.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolm import defaults, ds_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Values that an optimizer keeps of each parameter, where they are not AdamW's two.
MOMENTS = {"adagrad": 1, "lion": 1, "muon": 1, "sgd": 0}


def hidden_size(config: "PretrainedConfig") -> int | None:
    """Return the model's width, the largest of several, as Hugging Face's Trainer does."""
    text = config.get_text_config()
    size = getattr(text, "hidden_size", None)
    return size or max(getattr(text, "hidden_sizes", None) or [0]) or None


def state_bytes(num_parameters: int, ds: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    """Return the bytes of weights, gradients and optimizer states per rank: (device, host)."""
    optimizer, weights = (ds_config.offload_device(ds, what) for what in ("optimizer", "param"))
    offload = "none" if optimizer == "none" else "optimizer"
    if offload == "optimizer" and weights != "none":
        offload = "both"
    precision = ds_config.precision(ds)
    accumulated = ds_config.block(ds, "data_types").get("grad_accum_dtype") or precision
    return defaults.model_state_bytes(
        num_parameters,
        stage=ds_config.zero_stage(ds),
        world_size=world_size,
        precision=precision,
        gradient_bytes=4 if accumulated == "fp32" else 2,
        offload=offload,
    )


def checkpoint_bytes(num_parameters: int, ds: Mapping[str, Any]) -> int:
    """Return the bytes of one checkpoint of all ranks: weights, master weights, moments.

    Below stage 3 the weights are there beside the fp32 master weights of the optimizer.
    """
    moments = MOMENTS.get(ds_config.optimizer_type(ds).lower(), 2)
    value = 4 + 4 * moments
    if ds_config.zero_stage(ds) < 3:
        value += 4 if ds_config.precision(ds) == "fp32" else 2
    return num_parameters * value


def activation_bytes(
    config: "PretrainedConfig", tokens: int, precision: str, checkpointing: bool
) -> int:
    """Return the bytes that a micro-batch of so many tokens keeps for its backward pass."""
    text = config.get_text_config()
    hidden = hidden_size(config) or 0
    width = getattr(text, "moe_intermediate_size", None)
    width = width or getattr(text, "intermediate_size", None) or 4 * hidden
    experts = getattr(text, "num_experts_per_tok", None) or 1
    return defaults.activation_bytes(
        tokens,
        hidden_size=hidden,
        intermediate_size=width * experts,
        num_layers=getattr(text, "num_hidden_layers", None) or 0,
        vocab_size=text.vocab_size,
        precision=precision,
        checkpointing=checkpointing,
    )


def fitting_micro_batch(
    per_rank: int,
    seq_len: int,
    *,
    config: "PretrainedConfig",
    num_parameters: int,
    ds: Mapping[str, Any],
    world_size: int,
    memory_bytes: int | None,
    checkpointing: bool,
) -> int:
    """Return the largest power of two that divides `per_rank` sequences and fits the device.

    Args:
        memory_bytes: of the device; None on a CPU, where a few thousand tokens fill the cores.
    """
    if memory_bytes is None:
        return defaults.micro_batch_size(per_rank, seq_len, defaults.CPU_MICRO_BATCH_TOKENS)
    free = int(memory_bytes * defaults.MEMORY_SHARE)
    free -= state_bytes(num_parameters, ds, world_size)[0]
    one = activation_bytes(config, seq_len, ds_config.precision(ds), checkpointing)
    return defaults.micro_batch_size(per_rank, one, free)
