"""FLOPs of a training token and peak FLOPs of devices: numerator and denominator of MFU.

Pure, without torch. Must not depend on how a model is run: attention kernels and recomputation
change the time of a step, not the operations that the model needs.
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
TRAINING_TO_FORWARD = 3  # each matrix product has two of its size in the backward pass


def flops_per_token(
    config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]], seq_len: int
) -> float:
    """Return the FLOPs of one training token, forward and backward; a multiply-add counts as two.

    Counts matrix products as `torch.utils.flop_counter` does: projections, the output head (also
    with a tied weight), the experts that a token is routed to, and the two products of attention
    over all `seq_len` keys, not halved for causality, or over a shorter window of the config. Does
    not count lookups, norms, activations, the optimizer and recomputation.

    Args:
        shapes: of all parameters, tied ones once, from `parameter_shapes`.

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
    multiply_adds += _attention_multiply_adds(text_config, seq_len)
    return TRAINING_TO_FORWARD * 2 * multiply_adds


def recomputed_flops_per_token(
    config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]], seq_len: int
) -> float:
    """Return the FLOPs that gradient checkpointing recomputes: a forward pass without the head.

    Args:
        shapes: of all parameters, tied ones once.
    """
    forward = flops_per_token(config, shapes, seq_len) / TRAINING_TO_FORWARD
    return forward - head_flops_per_token(config, shapes)


def head_flops_per_token(
    config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]]
) -> float:
    """Return the forward FLOPs of the output head, which a chunked loss recomputes.

    Args:
        shapes: of all parameters, tied ones once.
    """
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
    """Return the width of the tied output head, from the token embedding."""
    widths = [
        shape[1]
        for name, shape in shapes.items()
        if len(shape) == 2 and shape[0] == config.vocab_size and LOOKUP.search(name)
    ]
    return widths[0] if widths else 0


def _attention_multiply_adds(config: "PretrainedConfig", seq_len: int) -> float:
    """Return the multiply-adds of one query with all keys and values, in all heads and layers."""
    layer_types = getattr(config, "layer_types", None)
    layers = layer_configs(config)
    if not layer_types:
        layer_types = [None] * len(layers)
    return sum(
        _attended_keys(layer, layer_type, seq_len) * _attention_width(layer)
        for layer, layer_type in zip(layers, layer_types, strict=False)
    )


def _attention_width(layer: "PretrainedConfig") -> float:
    """Return the multiply-adds of one query with one key and its value, in all heads of a layer."""
    heads = getattr(layer, "num_attention_heads", 0) or 0
    if not heads:
        return 0
    if getattr(layer, "kv_lora_rank", None):  # multi-head latent attention (DeepSeek)
        return heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim)
    return heads * 2 * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)


def _attended_keys(layer: "PretrainedConfig", layer_type: str | None, seq_len: int) -> int:
    """Return the number of keys per query of a layer; 0 for a layer without attention."""
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


# Dense matrix TFLOP/s with 32-bit accumulation, without sparsity, from the vendors' datasheets:
# (device name, bf16, fp16, fp32 without TF32). The first match counts. MIG slices and laptop GPUs
# have a fraction of these and do not match.
PEAK_TFLOPS: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    # NVIDIA Blackwell datasheets (B200, GB200 NVL72), halved from "with sparsity"
    (r"\bGB200\b", 2500, 2500, 80),
    (r"\bB200\b", 2250, 2250, 75),
    # NVIDIA H100, H200 and GH200 datasheets, halved from "with sparsity"
    (r"\bH200 NVL\b", 835.5, 835.5, 60),
    (r"\bG?H200\b", 989.4, 989.4, 67),
    (r"\bH100 NVL\b", 835.5, 835.5, 60),
    (r"\bH100 PCIe\b", 756, 756, 51),
    (r"\bH100\b|\bH800\b", 989.4, 989.4, 67),
    # NVIDIA A100, A30, A10, A40 datasheets; A10G: AWS's and NVIDIA's product brief
    (r"\bA100\b|\bA800\b", 312, 312, 19.5),
    (r"\bA30\b", 165, 165, 10.3),
    (r"\bA40\b", 149.7, 149.7, 37.4),
    (r"\bA10G\b", 70, 70, 35),
    (r"\bA10\b", 125, 125, 31.2),
    # NVIDIA L40S, L40 and L4 datasheets, L4 halved from "with sparsity"
    (r"\bL40S\b", 362, 362, 91.6),
    (r"\bL40\b", 181, 181, 90.5),
    (r"\bL4\b", 121, 121, 30.3),
    # NVIDIA V100 and T4 datasheets: tensor cores of fp16 only
    (r"\bV100-PCIE\b", None, 112, 14),
    (r"\bV100\b", None, 125, 15.7),
    (r"\bT4\b", None, 65, 8.1),
    # NVIDIA Blackwell, Ada and Ampere GA102 architecture whitepapers, fp32 accumulation
    (r"\bRTX 5090\b(?! D)", 209.5, 209.5, 104.8),
    (r"\bRTX 4090\b(?! D)", 165.2, 165.2, 82.6),
    (r"\bRTX 3090\b(?! Ti)", 71, 71, 35.6),
    (r"\bRTX A6000\b", 154.8, 154.8, 38.7),
    # AMD Instinct datasheets; one device is one of MI250X's two dies
    (r"\bMI355X\b", 2516.6, 2516.6, 157.3),
    (r"\bMI300X\b|\bMI325X\b", 1307.4, 1307.4, 163.4),
    (r"\bMI250X\b", 191.5, 191.5, 47.9),
)
TF32 = "tf32"  # half of bf16 where it exists (NVIDIA Ampere and later, AMD MI300)
PRECISIONS = {"bfloat16": 0, "bf16": 0, "float16": 1, "fp16": 1, "float32": 2, "fp32": 2}


def peak_flops_per_second(device_name: str, dtype_name: str) -> float | None:
    """Return the dense peak FLOP/s of one device from its datasheet, or None if it is unknown.

    Args:
        device_name: from `torch.cuda.get_device_name()`.
        dtype_name: "bfloat16", "float16" or "float32" (or bf16, fp16, fp32), or tf32.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q", device_name):
        return None
    for pattern, *teraflops in PEAK_TFLOPS:
        if re.search(pattern, device_name):
            if dtype_name == TF32:
                half = teraflops[0] and teraflops[0] / 2 * 1e12
                return None if "MI250X" in pattern else half  # MI250X has no TF32
            peak = teraflops[PRECISIONS[dtype_name]]
            return None if peak is None else peak * 1e12
    return None
