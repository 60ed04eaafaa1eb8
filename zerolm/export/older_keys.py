"""Additional config.json keys for other readers: transformers 4, vLLM, llama.cpp, MLX.

transformers 5 writes rotary embeddings only as `rope_parameters`. A reader that expects
`rope_theta` and `rope_scaling` finds neither, silently uses its defaults, and so runs a different
model. Keys specific to one model family are in `published_keys`.
"""

import copy
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.files import write_json
from zerolm.common.records import read_json
from zerolm.model.published_keys import missing_period, published_keys

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NEW = "rope_parameters"
POSITIONS = "original_max_position_embeddings"
# Names of the rotary base, the base for sliding-window layers, and the rotated share of a head.
NAMES = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")
OTHER_NAMES = {
    "gpt_neox": ("rotary_emb_base", "", "rotary_pct"),
    "gpt_neox_japanese": ("rotary_emb_base", "", "rotary_pct"),
    "modernbert-decoder": ("global_rope_theta", "", ""),  # version 4 uses one base for all layers
    "olmo3": ("rope_theta", "", ""),
}
# `rope_scaling` keys that must all be present, with no others, for some transformers 4 classes.
LONGROPE = {"type", "short_factor", "long_factor"}
ACCEPTED = {
    "olmo": {"type", "factor"}, "olmo2": {"type", "factor"},
    "phi3": LONGROPE, "phi4_multimodal": LONGROPE,
}  # fmt: skip
# Parts of a config whose transformers 4 classes refuse any key not listed here.
ONLY = {
    "attn_config": {"attn_pdrop", "clip_qkv", "kv_n_heads", "rope_theta"},
    "ffn_config": {
        "ffn_act_fn", "ffn_hidden_size", "moe_num_experts", "moe_top_k", "moe_jitter_eps",
        "moe_loss_weight", "moe_normalize_expert_weights",
    },
}  # fmt: skip
# What programs drop of a family that they otherwise compute alike: scaled rotary embeddings, or any
# base but 10,000 too. Found by `python -m tests.readers` with the variants of its models.
SCALING, BASE = "the scaling", "the base and scaling"
DROPPED = {
    "ctranslate2 4.8.5": {
        **dict.fromkeys(("gemma", "llama", "qwen2", "qwen3"), SCALING),
        **dict.fromkeys(("falcon", "gpt_neox"), BASE),
    },
    "mlx-lm 0.32.2": {"gemma": SCALING},
}


def add_older_keys(directory: Path, config: "PretrainedConfig") -> list[str]:
    """Add the older keys to the config.json that `config` wrote.

    Returns:
        A line for each part of the model with rotary embeddings or layers that older keys cannot
        describe.
    """
    path, notices = directory / "config.json", []
    values = _plain_numbers(read_json(path, "the config.json of a model"))
    for name in ("", *config.sub_configs):
        part = getattr(config, name, None) if name else config
        written = values.get(name) if name else values
        if part is None or not isinstance(written, dict):
            continue
        keys = rope_keys(part)
        if keys is None:
            notices.append(
                f"{path}: no older keys are equivalent to {part.model_type}'s {NEW}: readers for "
                f"transformers 4 would compute a different model"
            )
        notices += [f"{path}: {line}" for line in dropped(part)]
        if key := missing_period(part):
            notices.append(
                f"{path}: {part.model_type}'s layer_types are not periodic, so {key} cannot "
                f"express them: programs that read only that key would compute a different model"
            )
        renamed = {"torch_dtype": "dtype", "num_experts": part.attribute_map.get("num_experts")}
        same = {old: written[new] for old, new in renamed.items() if new in written}
        written |= {**(keys or {}), **same, **written}
        written |= _published(part, written)
        if config.model_type == "dbrx" and name in ONLY:
            values[name] = {key: value for key, value in written.items() if key in ONLY[name]}
    write_json(path, values)
    return notices


def dropped(config: "PretrainedConfig") -> list[str]:
    """Return a line for each program that computes a model without its rotary embeddings."""
    rope = getattr(config, NEW, None) or {}
    kind, base = rope.get("rope_type", "default"), rope.get("rope_theta", 10000.0)
    return [
        f"{program} drops or refuses {what} of {config.model_type}'s rotary embeddings "
        f"(rope_type {kind}, rope_theta {base:g}), and so may compute a different model"
        for program, families in DROPPED.items()
        if (what := families.get(config.model_type))
        and (kind != "default" or (what == BASE and base != 10000.0))
    ]


def set_tied(config: "PretrainedConfig", model: Any) -> None:
    """Set `tie_word_embeddings` in a config to whether the model ties its embeddings, in place.

    transformers 5 reads the key from the whole config, version 4 from its text part; some version
    5 classes tie nothing, regardless of the config.
    """
    given, output = model.get_input_embeddings(), model.get_output_embeddings()
    if given is None or output is None:
        return
    for part in (config, config.get_text_config()):
        if hasattr(part, "tie_word_embeddings"):
            part.tie_word_embeddings = output.weight is given.weight


def drop_idle_share(config: "PretrainedConfig", model: Any) -> list[str]:
    """Remove a `partial_rotary_factor` that the model ignores, in place; return a line about it.

    transformers 4 would obey it in some of these families, and fail or compute another model.
    """
    text = config.get_text_config()
    rope = getattr(text, NEW, None) or {}
    if rope.get("rope_type") != "default" or rope.get(NAMES[2], 1.0) == 1.0:
        return []
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotated = {2 * each.inv_freq.numel() for each in model.modules() if hasattr(each, "inv_freq")}
    if rotated != {size}:
        return []
    return [
        f"config.json: {NAMES[2]} {rope.pop(NAMES[2]):g} is left out, since {text.model_type} "
        f"rotates all {size} values of a head, as in training"
    ]


def _plain_numbers(value: Any) -> Any:
    """Convert numbers that transformers 5 writes as `{"__float__": "Infinity"}` back to numbers.

    Published models contain them as Python's json writes them, which all versions can read.
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain_numbers(each) for key, each in value.items()}
    return [_plain_numbers(each) for each in value] if isinstance(value, list) else value


def _published(part: "PretrainedConfig", written: dict[str, Any]) -> dict[str, Any]:
    """Return those keys from the model family's published files that do not change the config that
    this version reads.
    """
    given = {key: value for key, value in written.items() if key != "dtype"}

    def read(**keys: Any) -> dict[str, Any]:
        return type(part).from_dict(copy.deepcopy({**given, **keys})).to_dict()

    before, found = read(), {}
    for key, value in published_keys(part).items():
        with suppress(Exception):  # errors from strict dataclasses and the classes
            after = read(**{key: value})
            if _meaning({**after, key: None}) == _meaning({**before, key: None}):
                found[key] = value
    return found


def rope_keys(config: "PretrainedConfig") -> dict[str, Any] | None:
    """Return the older keys for a config's rotary embeddings, or None if older keys cannot describe
    them.
    """
    full, sliding = getattr(config, NEW, None), None
    if not full:
        return {}
    if any(isinstance(each, dict) for each in full.values()):  # by layer type
        full, sliding = full.get("full_attention"), full.get("sliding_attention")
    if not full:
        return None
    base, local_base, share = OTHER_NAMES.get(config.model_type, NAMES)
    keys = {base: full["rope_theta"], "rope_scaling": _scaling(config, full)}
    rotated = full.get("partial_rotary_factor")
    if share and rotated is not None:
        keys[share] = rotated
    if full["rope_type"] == "longrope":
        keys[POSITIONS] = full[POSITIONS]
    if sliding is not None:
        if local_base:
            keys[local_base] = sliding["rope_theta"]
        local = {"rope_type": "default", "rope_theta": keys.get(local_base, full["rope_theta"])}
        if sliding != local | ({} if rotated is None else {"partial_rotary_factor": rotated}):
            return None
    values = config.to_dict()
    if any(values.get(key, value) != value for key, value in keys.items()):
        return None
    try:  # this version reads both, and the resulting config must not change
        read = type(config).from_dict(copy.deepcopy(values | keys))
    except Exception:  # errors from strict dataclasses and the classes
        return None
    return keys if _meaning(getattr(read, NEW)) == _meaning(values[NEW]) else None


def _scaling(config: "PretrainedConfig", parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling` with its type under `rope_type` and, for the oldest readers, `type`;
    None if nothing is scaled.
    """
    elsewhere = {"rope_theta", "partial_rotary_factor"}
    scaling = {key: value for key, value in parameters.items() if key not in elsewhere}
    scaling["type"] = scaling["rope_type"]
    if scaling.keys() == {"type", "rope_type"} and scaling["type"] == "default":
        return None
    accepted = ACCEPTED.get(config.model_type, set())
    beside = {"rope_type", POSITIONS} if scaling["type"] == "longrope" else {"rope_type"}
    if scaling.keys() - beside == accepted:
        return {key: value for key, value in scaling.items() if key in accepted}
    return scaling


def _meaning(value: Any) -> Any:
    """Return a config value without rotary embedding keys that have no effect."""
    if not isinstance(value, dict):
        return value
    idle = {"type": value.get("type"), "partial_rotary_factor": 1.0}
    return {key: _meaning(each) for key, each in value.items() if (key, each) not in idle.items()}
