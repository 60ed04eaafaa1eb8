"""Reads and checks a Hugging Face config.json.

Nothing is downloaded, and no code named in the file is executed. torch and transformers are
imported inside functions to keep `--help` fast. Must not depend on DeepSpeed, data or settings.
"""

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.common.records import read_json
from zerolm.common.shipped import find_config
from zerolm.common.values import shown
from zerolm.config.custom_code import kernel_problems
from zerolm.model import config_keys, config_words
from zerolm.model.architecture import has_padding_position, num_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WHAT = (
    "a Hugging Face config.json or a directory with one (hub names are not downloaded); "
    "model_configs/ has some"
)

# building a larger model would take hours and all memory
MAX_LAYERS, MAX_SIZE = 10_000, 100_000_000
LIMITS = (  # maximum values by the endings of keys
    (re.compile(r"(layers?|blocks|depth)$"), MAX_LAYERS),
    (re.compile(r"(size|dim|heads?|experts?|model|embd|inner|rank|state|kernel)$"), MAX_SIZE),
)

# Causal language models in transformers that cannot be trained on text alone.
UNSUITABLE = {
    "gemma4_assistant": "drafts tokens from the states of another model. Use gemma4_text",
    "gemma4_unified_assistant": "drafts tokens from the states of another model. Use gemma4_text",
}


def load_model_config(
    path: str | Path, notices: list[str] | None = None, written: dict[str, Any] | None = None
) -> "PretrainedConfig":
    """Read a config.json, given its path or directory; accept what `AutoConfig` accepts for a
    causal LM.

    Args:
        notices: receives a line listing the keys that no code reads, and a line for each ignored
            value.
        written: receives the content of the file.

    Raises:
        ConfigError: lists every problem: a missing file, invalid JSON, an unknown or unsuitable
            model type, values that the config class refuses, or misspelled keys.
    """
    file = find_config(path)
    if file.is_dir():
        file = file / "config.json"
    values = _special_floats(read_json(file, WHAT))
    for key in ("attn_implementation", "_attn_implementation"):
        if str(values.get(key)).startswith("flash_attention_"):
            del values[key]  # --attn_implementation decides; this key could download a kernel
    notices = [] if notices is None else notices
    for key, needed in config_keys.OF_THE_OUTPUTS.items():
        if isinstance(values.get(key), bool) and values[key] != needed:
            notices.append(
                f"{file}: {key}: ignored, since training and export need {str(needed).lower()}"
            )
            del values[key]
    if written is not None:
        written |= values
    if problems := _size_problems(str(file), values):
        raise ConfigError(problems)
    config_class = _config_class(file, values)
    words = config_words.word_problems(str(file), config_class, values)
    wrong = {key.partition(".")[0] for key in words}
    known = {key: value for key, value in values.items() if key not in wrong}
    config, problems = construct(str(file), config_class, known)
    problems += words.values()
    if config is not None:
        problems += _contradictions(file, config)
        problems += _check_keys(file, config, values, notices)
    problems += kernel_problems(file, values)
    if problems:
        raise ConfigError(problems)
    assert config is not None
    for key, why in config_keys.idle_keys(config, values).items():
        notices.append(f"{file}: {key}: {_value_at(values, key)} has no effect: {why}")
    _drop_padding_outside(file, config, notices)
    return config


def _drop_padding_outside(file: Path, config: "PretrainedConfig", notices: list[str]) -> None:
    """Remove a padding id outside the embedding, which torch would refuse or count from the end.

    Model families whose positions begin after the padding id keep it.
    """
    text = config.get_text_config()
    padding, size = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if padding is None or size is None or 0 <= padding < size or has_padding_position(config):
        return
    notices.append(
        f"{file}: pad_token_id: {padding} is ignored: it is outside the vocabulary of {size} "
        f"tokens, and pretraining has no padding"
    )
    for part in (text, config):
        part.pad_token_id = None


def _size_problems(where: str, values: dict[str, Any]) -> list[str]:
    problems = []
    for key, value in values.items():
        if isinstance(value, dict):
            problems += _size_problems(f"{where}: {key}", value)
        elif type(value) is int:
            limits = [limit for name, limit in LIMITS if name.search(key)]
            if limits and value > limits[0]:
                problems.append(f"{where}: {key}: {value} must be at most {limits[0]:,}.")
    return problems


def _special_floats(value: Any) -> Any:
    """Replace objects such as {"__float__": "Infinity"}, which transformers writes for some
    numbers.
    """
    if isinstance(value, list):
        return [_special_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    name = value.get("__float__") if len(value) == 1 else None
    if name in ("Infinity", "-Infinity", "NaN"):
        return float(name)
    return {key: _special_floats(each) for key, each in value.items()}


def _config_class(file: Path, values: dict[str, Any]) -> type["PretrainedConfig"]:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        near = did_you_mean("model_type", values)
        raise ConfigError(
            f'{file}: model_type: missing. Name an architecture, for example "llama".{near}'
        )
    if model_type not in CONFIG_MAPPING:
        near = did_you_mean(model_type, CONFIG_MAPPING)
        code = "auto_map" in values
        code_line = " The code named in auto_map is never executed." if code else ""
        raise ConfigError(
            f"{file}: model_type: {model_type!r} is unknown to the installed "
            f"transformers.{code_line}{near}"
        )
    config_class = CONFIG_MAPPING[model_type]
    if model_type in UNSUITABLE:
        raise ConfigError(f"{file}: model_type: {model_type!r} {UNSUITABLE[model_type]}.")
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        near = did_you_mean(model_type, [known.model_type for known in MODEL_FOR_CAUSAL_LM_MAPPING])
        raise ConfigError(
            f"{file}: model_type: {model_type!r} has no causal language model, and only these "
            f"can be trained.{near}"
        )
    return config_class


def construct(
    where: str, config_class: type["PretrainedConfig"], values: dict[str, Any]
) -> tuple["PretrainedConfig | None", list[str]]:
    """Return the config without the values that its class refuses, and the problems found."""
    problems: list[str] = []
    ignored = {"model_type", *config_keys.OF_THE_CHECKPOINT}
    accepted = copy.deepcopy({key: values[key] for key in values if key not in ignored})
    while True:
        try:
            return config_class(**accepted), problems
        except Exception as error:  # strict dataclass errors, and ValueErrors from the classes
            reason = " ".join(str(error.__cause__ or error).split())
            field = re.search(r"Validation error for field '(\w+)'", str(error))
            if field and "expected float, got int" in reason and _make_float(accepted, field[1]):
                continue  # in JSON, 1 is equivalent to 1.0
            if field and field[1] in accepted:
                problems.append(f"{where}: {field[1]}: {reason}")
                del accepted[field[1]]
                continue
            return None, [*problems, f"{where}: {reason}"]


def _make_float(values: dict[str, Any], key: str) -> bool:
    """Convert an integer at a key to a float, also in sub-configs; return whether there was one."""
    if type(values.get(key)) is int:
        values[key] = float(values[key])
        return True
    return any(_make_float(part, key) for part in values.values() if isinstance(part, dict))


def _check_keys(
    file: Path, config: "PretrainedConfig", values: dict[str, Any], notices: list[str]
) -> list[str]:
    """Return misspelled keys; add a notice listing all other keys that no code reads."""
    of_checkpoint = config_keys.OF_THE_CHECKPOINT
    ignored = [f"{key} ({why})" for key, why in of_checkpoint.items() if key in values]
    problems = []
    for key, meant in config_keys.unread_keys(config, values).items():
        if meant:
            problems.append(
                f"{file}: {key}: {type(config).__name__} has no such key, and nothing reads it. "
                f'Did you mean "{meant}"?'
            )
        else:
            ignored.append(key)
    if ignored:
        notices.append(
            f"{file}: keys that {config.model_type}'s code does not read have no effect: "
            f"{', '.join(ignored)}"
        )
    return problems


def _value_at(values: Any, key: str) -> str:
    for name in key.split("."):
        values = values[name]
    return shown(values)


def _contradictions(file: Path, config: "PretrainedConfig") -> list[str]:
    """Return problems that transformers detects only in a forward pass, or never."""
    problems = []
    try:
        text_config = config.get_text_config()
    except ValueError:
        return [f"{file}: model_type: {config.model_type!r} holds several text models."]
    if isinstance(text_config, dict):  # the config class stored the key as an unknown value
        name = next(key for key, value in vars(config).items() if value is text_config)
        return [
            f"{file}: {name}: {type(config).__name__} has no such part. Give the model_type of the "
            f"whole model, or replace the file by the content of {name}."
        ]
    if getattr(config, "is_encoder_decoder", False):
        problems.append(f"{file}: is_encoder_decoder: true, but only decoders can be trained.")
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        value = getattr(text_config, key, None)
        if isinstance(value, int) and value < 1:
            problems.append(f"{file}: {key}: {value} must be at least 1.")
    for key, value in vars(text_config).items():
        if key.rpartition("_")[2] in ("eps", "epsilon") and value is not None and not value >= 0:
            problems.append(
                f"{file}: {key}: {value} must not be negative, since its square root is used."
            )
    layers = text_config.per_layer_config if text_config.is_heterogeneous else [text_config]
    for heads, groups in dict.fromkeys(map(_heads, layers)):
        if isinstance(heads, int) and heads < 1:
            problems.append(f"{file}: num_attention_heads: {heads} must be at least 1.")
        elif isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
            problems.append(
                f"{file}: num_key_value_heads: {groups} must divide num_attention_heads, {heads}."
            )
    experts, active = num_experts(config)
    if experts and active and not 1 <= active <= experts:
        problems.append(
            f"{file}: num_experts_per_tok: {active} must be from 1 to {experts}, the number of "
            f"experts."
        )
    return problems


def _heads(layer: "PretrainedConfig") -> tuple[int | None, int | None]:
    names = ("num_attention_heads", "num_key_value_heads")
    heads, groups = (getattr(layer, name, None) for name in names)
    return heads, groups
