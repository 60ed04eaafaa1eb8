"""Compare a run's model config with the config of the existing weights that it starts from.

Values that define the function of the model must be equal, or the weights would compute something
else. Training choices may differ, and the vocabulary may grow. Rotary positions may also change:
training on longer sequences adapts the weights to them.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zerolm.common.values import shown
from zerolm.model.architecture import router_loss_coefficient
from zerolm.model.published_keys import published_keys

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY = "vocab_size"
# Keys that affect neither the weights nor the function of a causal language model in training.
WITHOUT_EFFECT = frozenset(
    {
        "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype",
        "use_cache", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id",
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
        "task_specific_params", "tokenizer_class", "prefix", "pretraining_tp", "return_dict",
        "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "auto_map",
        "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "n_ctx",
    }
)  # fmt: skip
# Older keys whose values are also in `rope_parameters`. Its `type` is an older `rope_type`.
REPEATED = frozenset({"original_max_position_embeddings", "partial_rotary_factor"})
# Training choices: regularisation, router losses, and the distribution of values in new rows.
TRAINING_CHOICES = frozenset(
    {
        "output_router_logits", "router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef",
        "router_jitter_noise", "layerdrop", "initializer_range", "initializer_std",
        "initializer_factor", "embedding_initializer_range",
    }
)  # fmt: skip
ROPE = "rope_parameters"
# {rotary key, or new `rope_type`: effect of changing the value}.
LIMIT = "max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"
EFFECTS = {
    "rope_theta": "a larger base lowers all rotary frequencies except the highest",
    LIMIT: "the longest --seq_len, and the context that an export declares",
    "default": "frequencies of rope_theta alone",
    "linear": "divides all frequencies by factor",
    "dynamic": f"has no effect up to {LIMIT}, so none in training; longer inputs get a larger base",
    "yarn": "divides low frequencies by factor, keeps high ones, and scales the attention logits",
    "llama3": f"divides by factor all frequencies slower than {ORIGINAL} / low_freq_factor",
    "longrope": "divides each frequency by its own factor, and scales the attention logits: "
    f"long_factor for inputs above {ORIGINAL}, otherwise short_factor",
}


class Comparison(NamedTuple):
    """The differences between two configs.

    Attributes:
        problems: keys that must agree but differ, and contradictory rotary positions.
        notices: training choices and rotary positions that differ.
    """

    problems: list[str]
    notices: list[str]


def compare(
    config: "PretrainedConfig", path: str, source: "PretrainedConfig", source_path: str
) -> Comparison:
    """Compare a run's config with the config of the weights that the run starts from."""
    if config.model_type != source.model_type:
        return Comparison(
            [
                f"{path}: model_type: {config.model_type!r}, but the weights in {source_path} are "
                f"{source.model_type!r}. Remove --model_config to use the source's config."
            ],
            [],
        )
    new, old = (_flat(_values(each)) for each in (config, source))
    problems, notices = [], []
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) == old.get(key):
            continue
        leaf = key.rpartition(".")[2]
        line = f"{path}: {key}: {shown(new.get(key))}, --init_from {source_path} has "
        line += shown(old.get(key))
        if leaf in WITHOUT_EFFECT or key in REPEATED or is_position(key):
            continue
        if leaf in TRAINING_CHOICES or "dropout" in leaf or leaf.endswith("pdrop"):
            notices.append(f"{line}: the run uses {shown(new.get(key))}")
        elif leaf != VOCABULARY or not _is_larger(new.get(key), old.get(key)):
            problems.append(
                f"{line}. Give the source's value, or remove --model_config to use its config."
            )
    positions = compare_positions(config, path, source, f"--init_from {source_path}")
    return Comparison(problems + positions.problems, positions.notices + notices)


def _values(config: "PretrainedConfig") -> dict[str, Any]:
    """Return a config's values, with the keys used in exports and most published files added."""
    values = config.to_dict() | published_keys(config)
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            values[name] = values.get(name, {}) | published_keys(part)
    return values


def router_notices(config: "PretrainedConfig", where: str) -> list[str]:
    """Return a notice if the config in a model directory turns off the model's router loss."""
    if getattr(config.get_text_config(), "output_router_logits", None) is not False:
        return []
    trained = copy.deepcopy(config)
    trained.get_text_config().output_router_logits = True
    if not router_loss_coefficient(trained):
        return []
    return [
        f"--init_from {where}: output_router_logits is false in its config.json, so this run has "
        f"no router loss. Copy config.json, set the key to true, and give it as --model_config"
    ]


def is_position(key: str) -> bool:
    """Return whether `compare_positions` compares this dotted config key."""
    *parts, leaf = key.split(".")
    return leaf in (LIMIT, ORIGINAL, ROPE) or ROPE in parts


def compare_positions(
    config: "PretrainedConfig", path: str, source: "PretrainedConfig", where: str
) -> Comparison:
    """Compare rotary settings and the position limit, which may differ if all positions are rotary.

    Args:
        where: name of the source in messages.
    """
    new, old = _flat(config.to_dict()), _flat(source.to_dict())
    problems, notices = [], []
    has_rope = all(any(f"{ROPE}." in key for key in each) for each in (new, old))
    for key in filter(is_position, sorted(new.keys() | old.keys())):
        leaf = key.rpartition(".")[2]
        if new.get(key) == old.get(key) or key in REPEATED or leaf == "type":
            continue
        line = f"{path}: {key}: {shown(new.get(key))}, {where} has {shown(old.get(key))}"
        if has_rope and leaf != "partial_rotary_factor":
            notices.append(f"{line}: {_effect(key, new)}")
        else:
            problems.append(
                f"{line}. Give the source's value; another value would be a different model."
            )
    return Comparison(problems + _rope_problems(new, old, path), notices)


def _effect(key: str, values: Mapping[str, Any]) -> str:
    part, _, leaf = key.rpartition(".")
    kind = values.get(f"{part}.rope_type", "default")
    if leaf == "rope_type":
        return EFFECTS.get(kind, f"frequencies of {kind}")
    return EFFECTS.get(leaf, f"a value of rope_type {shown(kind)}")


def _rope_problems(new: Mapping[str, Any], old: Mapping[str, Any], path: str) -> list[str]:
    """Return problems with changed rotary settings that transformers does not report at first.

    transformers guesses a value instead, or fails only in a forward pass.
    """
    problems = []
    for key, value in new.items():
        part, _, leaf = key.rpartition(".")
        if ROPE not in part or value == old.get(key):
            continue
        limit = part.partition(ROPE)[0] + LIMIT
        longest, before = new.get(limit) or 0, old.get(limit) or 0
        if leaf == ORIGINAL and value >= longest > before:
            problems.append(
                f"{path}: {key}: {value} must be below {limit} {longest}, which is transformers' "
                f"default for this key. Give the length that the weights were trained at, {before}."
            )
        other = new.get(f"{part}.short_factor")
        if leaf == "long_factor" and len(value) != len(other or ()):
            problems.append(f"{path}: {key}: must be as long as short_factor. Correct it.")
    return problems


def _is_larger(new: Any, old: Any) -> bool:
    return isinstance(new, int) and isinstance(old, int) and new > old


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value}; tuples become lists, as in JSON."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if (key, value) == ("partial_rotary_factor", 1.0):
            continue  # has the same effect as an absent key
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and key not in WITHOUT_EFFECT:
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat
