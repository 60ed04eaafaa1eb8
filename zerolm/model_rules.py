"""What the settings of a run ask of the model: positions, attention, checkpointing. No weights."""

from inspect import signature
from typing import TYPE_CHECKING

from zerolm import loss_chunks
from zerolm.architecture import causal_lm_class
from zerolm.settings import Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FULL_ATTENTION = "full_attention"
WINDOW_KEYS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def max_positions(config: "PretrainedConfig") -> int | None:
    """Return how many positions the model has, None where it has no such bound."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def attention_problems(settings: Settings, device: str) -> list[str]:
    """Check the attention kernel against the device and the document mask.

    Args:
        device: DeepSpeed's name of its kind, `cpu`, `cuda`, ...
    """
    attention = settings.attn_implementation
    where = settings.where("attn_implementation")
    if attention.startswith("flash") and device == "cpu":
        return [f"{where}: {attention}, needs a GPU. Use auto."]
    if attention.startswith("flash") and settings.document_mask:
        return [f"{where}: {attention}, cannot take --document_mask's mask. Use sdpa or eager."]
    return []


def model_problems(settings: Settings, config: "PretrainedConfig") -> list[str]:
    """Check the sequence length and gradient checkpointing against the model."""
    problems = []
    positions, seq_len = max_positions(config), settings.seq_len
    if positions and seq_len and seq_len > positions:
        problems.append(
            f"{settings.where('seq_len')}: {seq_len}, must not exceed the model's "
            f"max_position_embeddings {positions} ({settings.model_config}). Use at most "
            f"{positions}, or raise that."
        )
    model_class = causal_lm_class(config)
    if settings.gradient_checkpointing and not model_class.supports_gradient_checkpointing:
        problems.append(
            f"{settings.where('gradient_checkpointing')}: true, {model_class.__name__} has none. "
            f"Remove the flag."
        )
    if settings.loss_chunk_tokens and (why := loss_chunks.obstacle(config)):
        problems.append(
            f"{settings.where('loss_chunk_tokens')}: {settings.loss_chunk_tokens}, but {why} "
            f"({settings.model_config}). Remove the flag."
        )
    if settings.document_mask and (why := _unmasked(config, model_class, seq_len or 0)):
        problems.append(
            f"{settings.where('document_mask')}: true, {why} ({settings.model_config}). Remove the "
            f"flag, or use a model of full attention alone."
        )
    return problems


def _unmasked(
    config: "PretrainedConfig", model_class: type["PreTrainedModel"], seq_len: int
) -> str | None:
    """Say why the document mask would not keep documents apart, or would replace another mask.

    It has four dimensions, and transformers hands such a mask to every layer as it is
    (masking_utils.py, `_preprocess_mask_arguments`), whatever window the layer should have.
    """
    text = config.get_text_config()
    if getattr(model_class, "_is_stateful", False):
        return f"{model_class.__name__} keeps a state that runs on from document to document"
    if "position_ids" not in signature(model_class.forward).parameters or (
        getattr(text, "alibi", False) is True
    ):
        return f"{model_class.__name__} takes no positions that begin again with each document"
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # all layers are alike
        kinds = [kind for kind, key in WINDOW_KEYS.items() if getattr(text, key, None)]
    for kind in sorted(set(kinds) - {FULL_ATTENTION}):
        key = WINDOW_KEYS.get(kind, "")
        window = getattr(text, key, None) if key else None
        if not isinstance(window, int):
            return f"the model has layers of {kind}, which the mask does not reach"
        if window < seq_len:
            return f"replaces the model's {key} {window}, which is below --seq_len {seq_len}"
    return None


def has_router_loss(config: "PretrainedConfig") -> bool:
    """Tell whether a mixture of experts adds its router's loss to that of the tokens."""
    text = config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", None)
    return getattr(text, "output_router_logits", False) is True and coefficient != 0


def router_notices(settings: Settings, config: "PretrainedConfig") -> list[str]:
    """Say that a router's loss, a product of means over a micro-batch, depends on its size."""
    if not has_router_loss(config):
        return []
    return [
        f"{settings.model_config}: output_router_logits is true: the router's loss is made of "
        f"means over a micro-batch, so the curve depends a little on --micro_batch_size and the "
        f"world size (1e-3 in the gradient norm)"
    ]


def dropout_notices(settings: Settings, config: "PretrainedConfig") -> list[str]:
    """Say which dropout is on: it is allowed, but not the same on another number of ranks."""
    return [
        f"{settings.model_config}: {key} is {value}: dropout differs between ranks, so the curve "
        f"depends on the world size; 0 is usual for pretraining"
        for key, value in config.get_text_config().to_dict().items()
        if ("dropout" in key or key.endswith("pdrop"))
        and not key.startswith(("classifier", "summary"))  # heads that a causal LM has not
        and isinstance(value, (int, float))
        and value > 0
    ]
