"""Make the config of a small copy of a model, which differs only in having few, narrow layers.

`model_proof` runs the copy. The copy preserves what defines the model: kinds of layers and their
order, masks, windows, positions, multipliers, and experts per token. Must not create weights.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from zerolm.model.architecture import EXPERT_COUNT_KEYS, has_padding_position, num_experts
from zerolm.preflight.layer_kinds import DEPTHS, layer_kinds

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shapes = Mapping[str, tuple[int, ...]]

# {size: keys of transformers configs whose values are reduced to at most this size}
WIDTHS = {
    4096: """
        max_position_embeddings n_positions n_ctx max_seq_len context_length
        max_target_positions model_max_length max_source_positions
    """,
    512: """
        vocab_size vocab_size_per_layer_input
    """,
    128: """
        intermediate_size ffn_dim d_ff dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim
        ffn_hidden_size mlp_dim intermediate_size_mlp dense_intermediate_size feed_forward_size
    """,
    64: """
        hidden_size d_model n_embd dim hidden_size_global embedding_size word_embed_proj_dim
        lru_width backbone_hidden_size input_embedding_size output_embedding_size emb_dim
        embedding_dim adapter_in_dim adapter_out_dim adapter_input_size
    """,
    32: """
        moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size
        shared_intermediate_size moe_shared_expert_intermediate_size
        shared_experts_intermediate_size mamba_d_head mamba_head_dim mamba_headdim
    """,
    24: """
        qk_head_dim
    """,
    16: """
        head_dim dim_head d_head d_kv swa_head_dim kv_channels attention_head_size
        attention_head_dim q_lora_rank kv_lora_rank o_lora_rank
        qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim linear_value_head_dim
        linear_head_dim
    """,
    8: """
        qk_rope_head_dim rotary_dim state_size mamba_d_state ssm_state_size d_state
    """,
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads
        encoder_attention_heads attention_heads num_encoder_attention_heads
        num_decoder_attention_heads swa_num_attention_heads index_n_heads
        time_step_rank mamba_dt_rank linear_num_value_heads linear_num_heads mamba_n_heads
        mamba_num_heads n_mamba_heads
    """,
    2: """
        linear_num_key_heads o_groups
    """,
    1: """
        n_groups mamba_n_groups mamba_ngroups
    """,
}  # fmt: skip
AT_MOST = {key: size for size, keys in WIDTHS.items() for key in keys.split()}
GROUPED_HEADS = {  # {key for key-value heads: key for the query heads that share them}
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "kv_n_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
GROUPS_OF_EXPERTS = ("n_group", "num_expert_group")
FEW_VALUES = 2_000_000  # a copy with at most this many parameters keeps the model's widths
MANY_LAYERS = 100  # maximum number of layers for a copy with all layers
IN_A_LAYER = re.compile(r"(.*?\.)(\d+)\.(.*)")


@dataclass(frozen=True)
class Copy:
    """The config of a small copy.

    Attributes:
        same_widths: whether its layers are as wide as the model's.
    """

    config: "PretrainedConfig"
    same_widths: bool


def shallow_config(config: "PretrainedConfig", shapes: Shapes) -> "PretrainedConfig":
    """Return the config with only as many layers as it takes to include every kind of layer."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    layers = _layers(shapes)
    depth = len(layers)
    if depth > 2 and not getattr(text, "is_heterogeneous", False):
        lists = {
            key: value
            for key, value in vars(text).items()
            if isinstance(value, list | tuple) and len(value) == depth
        }
        more = layer_kinds(config)
        if len(more) != depth:
            more = [()] * depth
        kinds = [
            (layer, more[number], *(str(value[number]) for value in lists.values()))
            for number, layer in enumerate(layers)
        ]
        first = max(2, *(kinds.index(kind) + 1 for kind in set(kinds)))
        for key in DEPTHS:
            if getattr(text, key, None) == depth:
                _set(text, key, first)
        for key, value in lists.items():
            _set(text, key, value[:first])
    return small


def with_depth(config: "PretrainedConfig", depth: int) -> "PretrainedConfig":
    """Return the config with more layers, which are like the last one."""
    deep = copy.deepcopy(config)
    text = deep.get_text_config()
    old = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == old:
            _set(text, key, type(value)([*value, *[value[-1]] * (depth - old)]))
    for key in DEPTHS:
        if getattr(text, key, None) == old:
            _set(text, key, depth)
    return deep


def small_copies(config: "PretrainedConfig", shapes: Shapes) -> Iterator[Copy]:
    """Yield configs of small copies, starting with the copy most similar to the model."""
    small = shallow_config(config, shapes)
    if num_values(config, small, shapes) <= FEW_VALUES:
        yield Copy(small, same_widths=True)
        return
    yield Copy(_narrow(small), same_widths=False)
    if len(_layers(shapes)) <= MANY_LAYERS:  # the kind of a layer may depend on its index
        yield Copy(_narrow(copy.deepcopy(config)), same_widths=False)


def narrow_config(config: "PretrainedConfig") -> "PretrainedConfig | None":
    """Return the config with all layers, but narrow; None if it has more than `MANY_LAYERS`."""
    if config.get_text_config().num_hidden_layers > MANY_LAYERS:
        return None
    return _narrow(copy.deepcopy(config))


def num_values(config: "PretrainedConfig", small: "PretrainedConfig", shapes: Shapes) -> int:
    """Return the approximate number of parameters in a model with a `shallow_config`."""
    layers, depth = len(_layers(shapes)), getattr(small.get_text_config(), "num_hidden_layers", 0)
    total = 0
    for name, shape in shapes.items():
        inside = IN_A_LAYER.match(name)
        if not inside or int(inside[2]) < (depth or layers):
            total += math.prod(shape)
    return total


def _layers(shapes: Shapes) -> list[frozenset[tuple[str, tuple[int, ...]]]]:
    """Find the longest list of layers; return the names and shapes of each layer's parameters."""
    stacks: dict[str, dict[int, set[tuple[str, tuple[int, ...]]]]] = {}
    for name, shape in shapes.items():
        if inside := IN_A_LAYER.match(name):
            stack = stacks.setdefault(inside[1], {})
            stack.setdefault(int(inside[2]), set()).add((inside[3], shape))
    longest = max(stacks.values(), key=len, default={})
    return [frozenset(longest[number]) for number in sorted(longest)]


def _narrow(config: "PretrainedConfig") -> "PretrainedConfig":
    """Reduce the widths, heads and experts of a config in place; return the config."""
    text = config.get_text_config()
    _keep_padding(config)
    range_before = getattr(text, "initializer_range", None)
    width = getattr(text, "hidden_size", None)
    for part in (text, *(getattr(text, name, None) for name in type(text).sub_configs)):
        if part is not None:
            _reduce(part, num_experts(config)[1] or 1)
    if isinstance(range_before, float) and isinstance(width, int) and width > text.hidden_size > 0:
        _set(text, "initializer_range", range_before * math.sqrt(width / text.hidden_size))
    return config


def _keep_padding(config: "PretrainedConfig") -> None:
    """Remove the padding id if it is outside the copy's vocabulary."""
    for part in (config, config.get_text_config()):
        padding = getattr(part, "pad_token_id", None)
        outside = padding is not None and padding >= AT_MOST["vocab_size"]
        if outside and not has_padding_position(config):
            part.pad_token_id = None


def _reduce(part: "PretrainedConfig", experts_per_token: int) -> None:
    given = dict(vars(part))
    for key, most in AT_MOST.items():
        value = given.get(key)
        if isinstance(value, list):
            _set(part, key, [min(each, most) for each in value if isinstance(each, int)])
        elif type(value) is int and value > most:
            _set(part, key, most)
    for key, of in GROUPED_HEADS.items():
        of = type(part).attribute_map.get(of, of)
        groups, before, heads = given.get(key), given.get(of), vars(part).get(of)
        if _is_count(groups) and _is_count(before) and _is_count(heads) and before % groups == 0:
            _set(part, key, max(1, heads // (before // groups)))
    for key in EXPERT_COUNT_KEYS:
        experts = given.get(key)
        sizes = [given.get(name) for name in GROUPS_OF_EXPERTS]
        groups = next(filter(_is_count, sizes), 1)
        few = max(8, 2 * experts_per_token, 2 * groups)
        few += -few % groups
        if type(experts) is int and experts > few:
            _set(part, key, few)
    _reduce_dependent(part, given)


def _reduce_dependent(part: "PretrainedConfig", given: Mapping[str, Any]) -> None:
    """Update sizes that depend on the reduced sizes."""
    now = vars(part)
    rotary = given.get("qk_rope_head_dim")
    if rotary and given.get("head_dim") == rotary:  # they are equal in multi-head latent attention
        _set(part, "head_dim", now["qk_rope_head_dim"])
    if {"expand", "num_heads", "head_dim", "hidden_size"} <= given.keys():  # Mamba-2
        _set(part, "num_heads", int(now["expand"] * now["hidden_size"]) // now["head_dim"])
    rope, before = now.get("rope_parameters"), _head_dim(given)
    for key in ("short_factor", "long_factor"):  # longrope: one factor for each pair of dimensions
        if isinstance(rope, dict) and before and isinstance(rope.get(key), list):
            rope[key] = rope[key][: max(1, len(rope[key]) * _head_dim(now) // before)]


def _head_dim(values: Mapping[str, Any]) -> int:
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    usual = width // heads if _is_count(width) and _is_count(heads) else 0
    return values.get("head_dim") or usual


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _set(part: "PretrainedConfig", key: str, value: Sequence[Any] | Any) -> None:
    with suppress(
        AttributeError, TypeError, ValueError
    ):  # a read-only property, or a validated value
        setattr(part, key, value)
