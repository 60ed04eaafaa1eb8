"""FLOPs per training token, the numerator of MFU; `zerolm.plan.peak_flops` provides the
denominator.

Pure functions without torch. Must not depend on how a model is run: attention kernels and
recomputation change a step's time, but not the operations that the model requires.
"""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zerolm.model.architecture import is_routed_expert, layer_configs, routed_fraction

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A lookup reads one row, without multiplications. Output embeddings are lm_head or embed_out.
LOOKUP = re.compile(r"(^|[._])(wte|wpe|embed(?!_out)\w*|\w+_embeddings?|embeddings?)\.weight$")
TRAINING_TO_FORWARD = 3  # each matrix product requires two of the same size in the backward pass


def flops_per_token(
    config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]], seq_len: int
) -> float:
    """Return the FLOPs per training token, forward and backward; a multiply-add counts as two.

    Counts matrix products like `torch.utils.flop_counter`: projections, the output head (even if
    its weight is tied), the experts to which a token is routed, and attention's two products over
    all `seq_len` keys (not halved for causality) or over a shorter window set in the config. Does
    not count lookups, norms, activations, the optimizer or recomputation.

    Args:
        shapes: parameter shapes from `parameter_shapes`.

    Source: Kaplan et al. 2020, section 2.1, and PaLM (Chowdhery et al. 2022), appendix B.
    """
    text_config = config.get_text_config()
    multiply_adds = 0.0
    for name, shape in shapes.items():
        if len(shape) < 2 or LOOKUP.search(name) or name.endswith("bias"):
            continue
        share = routed_fraction(config) if is_routed_expert(name) else 1.0
        multiply_adds += share * math.prod(shape)
    if getattr(config, "tie_word_embeddings", False):
        multiply_adds += text_config.vocab_size * _output_width(text_config, shapes)
    multiply_adds += sum(attention_multiply_adds(text_config, seq_len))
    return TRAINING_TO_FORWARD * 2 * multiply_adds


def recomputed_flops_per_token(
    config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]], seq_len: int
) -> float:
    """Return the FLOPs that gradient checkpointing recomputes: a forward pass without the head."""
    forward = flops_per_token(config, shapes, seq_len) / TRAINING_TO_FORWARD
    return forward - head_flops_per_token(config, shapes)


def head_flops_per_token(
    config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]]
) -> float:
    """Return the forward FLOPs of the output head, which a chunked loss recomputes."""
    text_config = config.get_text_config()
    heads = [
        shape
        for name, shape in shapes.items()
        if len(shape) == 2 and shape[0] == text_config.vocab_size and not LOOKUP.search(name)
    ]
    if getattr(config, "tie_word_embeddings", False):
        width = _output_width(text_config, shapes)
        if width:
            return 2 * text_config.vocab_size * width
    return 2 * math.prod(heads[0]) if heads else 0.0


def _output_width(config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the width of a tied output head, read from the token embedding."""
    widths = [
        shape[1]
        for name, shape in shapes.items()
        if len(shape) == 2 and shape[0] == config.vocab_size and LOOKUP.search(name)
    ]
    return widths[0] if widths else 0


def attention_multiply_adds(config: "PretrainedConfig", seq_len: int) -> list[float]:
    """Return the attention multiply-adds per query in each layer: with all keys and values, in all
    heads.
    """
    layer_types = getattr(config, "layer_types", None)
    layers = layer_configs(config)
    if not layer_types:
        layer_types = [None] * len(layers)
    return [
        _attended_keys(layer, layer_type, seq_len) * _attention_width(layer)
        for layer, layer_type in zip(layers, layer_types, strict=False)
    ]


def _attention_width(layer: "PretrainedConfig") -> float:
    """Return the multiply-adds of a query with one key and its value, in all heads of a layer."""
    heads = getattr(layer, "num_attention_heads", 0) or 0
    if not heads:
        return 0
    if getattr(layer, "kv_lora_rank", None):  # multi-head latent attention (DeepSeek)
        return heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim)
    return heads * 2 * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)


def _attended_keys(layer: "PretrainedConfig", layer_type: str | None, seq_len: int) -> int:
    """Return the number of keys to which a query attends in a layer; 0 without attention."""
    window = getattr(layer, "sliding_window", None)
    if getattr(layer, "use_sliding_window", True) is False:
        window = None
    windowed = min(seq_len, window) if window else seq_len
    chunk = getattr(layer, "attention_chunk_size", None) or seq_len
    keys = {
        None: windowed,
        "full_attention": seq_len,
        "attention": seq_len,
        "sliding_attention": windowed,
        "chunked_attention": min(seq_len, chunk),
    }
    return keys.get(layer_type, 0)
