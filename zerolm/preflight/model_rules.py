"""Check settings against the model: positions, initial values, attention, compilation.

Must use only the model's config and class, and must not create weights.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError
from zerolm.common.remembered import recall
from zerolm.config.settings import HIGHEST, SELECTIVE, VARLEN, Settings
from zerolm.model import document_mask
from zerolm.model.architecture import (
    ConfigKey,
    causal_lm_class,
    has_padding_position,
    meta_model,
)
from zerolm.model.known_config import actual
from zerolm.model.model import max_positions, position_limit
from zerolm.pretrained.vocabulary import vocabulary
from zerolm.shards.reader import Source

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def attention_problems(settings: Settings, device: str, precision: str | None = None) -> list[str]:
    """Check that the device and, if known, the precision support the attention kernel."""
    attention = settings.attn_implementation
    where = settings.where("attn_implementation")
    if attention == VARLEN or attention.startswith("flash"):
        if device == "cpu":
            return [f"{where}: {attention} needs a GPU. Use auto."]
        if precision == "fp32":
            return [
                f"{where}: {attention} needs bf16 or fp16, but {settings.deepspeed_config} "
                f"computes in fp32. Enable bf16 there, or use auto."
            ]
    if attention == "flex_attention" and device == "cpu":
        return [f"{where}: {attention} has no backward pass on a CPU. Use sdpa or eager."]
    return []


def matmul_problems(settings: Settings, precision: str, device: str) -> list[str]:
    """Refuse TF32 if it would have no effect on this device or at this precision."""
    if settings.float32_matmul == HIGHEST:
        return []
    where = f"{settings.where('float32_matmul')}: {settings.float32_matmul}"
    if precision != "fp32":
        return [
            f"{where} needs fp32, but {settings.deepspeed_config} computes in {precision}. Remove "
            f"the flag."
        ]
    return [f"{where} needs a GPU. Remove the flag."] if device == "cpu" else []


# Families whose code multiplies float32 values by weights in the run's precision, which is an error
# in torch (transformers 5.17 to 5.23; found by tests/model_families).
FLOAT32_ONLY = frozenset({"inkling2_text", "reformer", "xlstm"})


def precision_problems(settings: Settings, config: "PretrainedConfig", precision: str) -> list[str]:
    """Refuse bf16 and fp16 for families whose code works only in float32."""
    if precision == "fp32" or config.model_type not in FLOAT32_ONLY:
        return []
    return [
        f"{settings.deepspeed_config}: {precision}, but the code of {config.model_type} works in "
        f"fp32 only ({settings.model_config}). Give --precision fp32, and enable neither bf16 nor "
        "fp16 in the file."
    ]


def model_problems(
    settings: Settings, config: "PretrainedConfig", device: str = "absent"
) -> list[str]:
    """Check that the model supports the sequence length, gradient checkpointing, compilation and
    masks.
    """
    problems = []
    problems += _position_problems(settings, config)
    problems += _initialization_problems(settings, config)
    model_class = causal_lm_class(config)
    if settings.gradient_checkpointing and not model_class.supports_gradient_checkpointing:
        problems.append(
            f"{settings.where('gradient_checkpointing')}: true, but {model_class.__name__} does "
            f"not support it. Remove the flag."
        )
    if settings.compile and settings.gradient_checkpointing == SELECTIVE:
        problems.append(
            f"{settings.where('gradient_checkpointing')}: selective, but with --compile the "
            f"compiler chooses what to recompute. Remove one of the flags."
        )
    kernel = settings.attn_implementation
    if kernel == VARLEN:
        problems += _varlen_problems(settings, config)
    if settings.document_mask and (
        why := document_mask.unsupported_reason(config, model_class, kernel)
    ):
        problems.append(
            f"{settings.where('document_mask')}: true, but {why} ({settings.model_config}). Remove "
            f"the flag, or use a model with full or sliding-window attention."
        )
    return problems


def _varlen_problems(settings: Settings, config: "PretrainedConfig") -> list[str]:
    from zerolm.attention import varlen  # imports torch

    why = varlen.model_problem(config)
    where = settings.where("attn_implementation")
    return [f"{where}: varlen {why} ({settings.model_config}) Use auto."] if why else []


def _position_problems(settings: Settings, config: "PretrainedConfig") -> list[str]:
    positions, limit, seq_len = max_positions(config), position_limit(config), settings.seq_len
    if not (positions and limit and seq_len and seq_len > positions):
        return []
    key, value = limit
    first = value - positions
    padding = f", of which {first} precede the first token" if first else ""
    return [
        f"{settings.where('seq_len')}: {seq_len} must not exceed the model's {key} "
        f"{value}{padding} ({settings.model_config}). Use at most {positions}, or raise it in the "
        f"model config."
    ]


def _initialization_problems(settings: Settings, config: "PretrainedConfig") -> list[str]:
    from zerolm.model.initialization import InitialWeights  # imports torch

    try:
        InitialWeights(config, settings.seed)
    except ConfigError as error:
        return [
            line.replace("model config", str(settings.model_config), 1) for line in error.problems
        ]
    return []


def padding_notices(
    settings: Settings, config: "PretrainedConfig", sources: Sequence[Source]
) -> list[str]:
    """Report that the padding token's embedding is trained, although transformers keeps it at zero.

    The token's text is read from the sources' tokenizer.
    """
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    if padding is None:
        return []
    facts = recall("padding", ConfigKey.of(config).inputs(), lambda: _padding_facts(config))
    if not facts["is_frozen"]:
        return []
    tokens: Mapping[str, int] = {}
    with suppress(ConfigError):  # reported by the checks that need the tokenizer
        for source in sources[:1]:  # all sources have the same tokenizer
            tokens = vocabulary(source.tokenizer_directory()) or {}
    token = next((repr(token) for token, number in tokens.items() if number == padding), "")
    origin = f" (the default of {facts['default_of']})" if facts["default_of"] else ""
    begins = "starts with the weights of --init_from" if settings.init_from else "is initialized"
    notice = (
        f"{settings.model_config}: pad_token_id: {padding}{origin}{token and f', {token}'}: "
        f"pretraining has no padding, so this token's embedding {begins} and is trained like all "
        "others"
    )
    if facts["has_position"]:
        notice += "; where the token occurs in text, the model gives it no position of its own"
    return [notice]


def _padding_facts(config: "PretrainedConfig") -> dict[str, Any]:
    """Return whether the model would not train the padding token's row, the class with this token
    as its default, and whether the token has no position of its own.
    """
    text = actual(config).get_text_config()
    frozen: set[int] = set()
    meta_model(config, frozen)
    is_default = getattr(type(text), "pad_token_id", None) == text.pad_token_id
    return {
        "is_frozen": bool(frozen),
        "default_of": type(text).__name__ if is_default else "",
        "has_position": has_padding_position(config),
    }


def layerdrop_problems(
    settings: Settings, config: "PretrainedConfig", world_size: int
) -> list[str]:
    """Refuse skipped layers with several ranks, which draw different layers."""
    values = config.get_text_config().to_dict()
    return [
        f"{settings.model_config}: {key}: {value}: each rank would skip other layers, but all "
        f"{world_size} ranks must reduce the same parameters' gradients. Use 0.0, or one rank."
        for key in ("layerdrop", "decoder_layerdrop")
        if world_size > 1 and (value := values.get(key))
    ]


def dropout_notices(settings: Settings, config: "PretrainedConfig") -> list[str]:
    """Report dropout, which is allowed although its random masks depend on the number of ranks."""
    return [
        f"{settings.model_config}: {key} is {value}: dropout differs between ranks and "
        f"micro-batches, so the loss curve depends on the world size and --micro_batch_size; 0 is "
        f"usual for pretraining"
        for key, value in config.get_text_config().to_dict().items()
        if "drop" in key
        and not key.startswith(("classifier", "summary"))  # for heads that causal LMs do not have
        and isinstance(value, (int, float))
        and value > 0
    ]
