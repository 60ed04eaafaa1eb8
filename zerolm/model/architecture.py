"""Reads and checks a Hugging Face config.json, and counts parameters on the meta device.

Allocates no weights and starts no process group. torch and transformers are imported inside the
functions, so that `--help` stays fast. Must not depend on DeepSpeed, data or settings.
"""

import copy
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.custom_code import kernel_problems
from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.common.shipped import find_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Keys of published config.json files that the config classes no longer have. None of them had an
# effect on the weights or the forward pass of a causal LM when it was removed.
OBSOLETE_KEYS = frozenset(
    {
        "_attn_implementation_autoset",
        "gradient_checkpointing",
        "is_llama_config",
        "max_sequence_length",
        "n_ctx",
        "pretraining_tp",
        "rope_interleaved",
        "task_specific_params",
        "tokenizer_class",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_mrope",
    }
)

# Encoders that transformers lists among the causal language models. Without is_decoder they let
# every position attend to the token it must predict; xlm and xlnet always do.
ENCODERS = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
NEVER_CAUSAL = frozenset({"xlm", "xlnet"})

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
ROUTED_EXPERT = re.compile(r"\bexperts\b")


def load_model_config(path: str | Path) -> "PretrainedConfig":
    """Read a model's config.json; nothing is downloaded and no remote code is run.

    Args:
        path: the file, or a directory with a config.json.

    Raises:
        ConfigError: a missing file, invalid JSON, an unknown or unsuitable model type, values that
            the config class refuses, or unknown keys; lists every problem.
    """
    file = find_config(path)
    if file.is_dir():
        file = file / "config.json"
    values = _read_json_object(file)
    for key in ("attn_implementation", "_attn_implementation"):
        if str(values.get(key)).startswith("flash_attention_"):
            del values[key]  # --attn_implementation decides; here it could download a kernel
    config_class = _config_class(file, values)
    config, problems = _construct(file, config_class, values)
    problems += kernel_problems(file, values)
    if config is not None:
        problems += _contradictions(file, config)
    if problems:
        raise ConfigError(problems)
    assert config is not None
    return config


def causal_lm_class(config: "PretrainedConfig") -> type["PreTrainedModel"]:
    """Return the class that `AutoModelForCausalLM.from_config` builds.

    Raises:
        ConfigError: the model type has no causal language model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ConfigError(
            f"model config: model_type {config.model_type!r} has no causal language model."
        ) from None
    return model_class[0] if isinstance(model_class, tuple) else model_class


def meta_model(config: "PretrainedConfig") -> "PreTrainedModel":
    """Build the model on the meta device: shapes without memory. Does not change the config.

    Raises:
        ConfigError: the model cannot be built from this config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    causal_lm_class(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # of any type: the classes do not validate all values
        raise ConfigError(
            f"model config: a {config.model_type!r} model cannot be built from these values "
            f"({type(error).__name__}: {error}). Correct the config.json."
        ) from error


def parameter_shapes(config: "PretrainedConfig") -> dict[str, tuple[int, ...]]:
    """Return {parameter name: shape} in module order, tied weights once.

    Raises:
        ConfigError: the model cannot be built from this config.
    """
    return {name: tuple(p.shape) for name, p in meta_model(config).named_parameters()}


def num_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of values of all shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def is_routed_expert(name: str) -> bool:
    """Return whether a parameter belongs to routed experts; shared experts serve every token."""
    return bool(ROUTED_EXPERT.search(name)) and ".router." not in name


def routed_fraction(config: "PretrainedConfig") -> float:
    """Return the fraction of the routed experts that serves one token; 1.0 for a dense model."""
    text_config = config.get_text_config()
    experts = _first_value(text_config, EXPERT_COUNT_KEYS)
    active = _first_value(text_config, EXPERTS_PER_TOKEN_KEYS)
    if experts is None or active is None:
        return 1.0
    return active / experts


def num_active_parameters(config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of parameters that serve one token, without the experts it skips."""
    routed = sum(math.prod(shape) for name, shape in shapes.items() if is_routed_expert(name))
    total = num_parameters(shapes)
    return total - routed + round(routed * routed_fraction(config))


def _first_value(config: "PretrainedConfig", keys: tuple[str, ...]) -> int | None:
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if value), None)


def _read_json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(
            f"{file}: no such file. --model_config takes a Hugging Face config.json or a "
            f"directory with one; hub names are not downloaded. See model_configs/."
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error}). Correct it.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: holds {type(values).__name__}, must be a JSON object.")
    return values


def _config_class(file: Path, values: dict[str, Any]) -> type["PretrainedConfig"]:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if "auto_map" in values:
        raise ConfigError(
            f"{file}: auto_map: refers to Python code of the model, which is never executed. "
            f"Remove the key, and use a model_type of transformers."
        )
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        near = did_you_mean("model_type", values)
        raise ConfigError(
            f'{file}: model_type: missing. Name an architecture, for example "llama".{near}'
        )
    if model_type not in CONFIG_MAPPING:
        near = did_you_mean(model_type, CONFIG_MAPPING)
        raise ConfigError(
            f"{file}: model_type: {model_type!r} is unknown to the installed transformers.{near}"
        )
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING or model_type in NEVER_CAUSAL:
        near = did_you_mean(model_type, [known.model_type for known in MODEL_FOR_CAUSAL_LM_MAPPING])
        raise ConfigError(
            f"{file}: model_type: {model_type!r} has no causal language model, and nothing "
            f"else can be trained.{near}"
        )
    return config_class


def _construct(
    file: Path, config_class: type["PretrainedConfig"], values: dict[str, Any]
) -> tuple["PretrainedConfig | None", list[str]]:
    """Return the config without the values that its class refuses, and the problems found."""
    problems = []
    accepted = {key: value for key, value in values.items() if key != "model_type"}
    while True:
        try:
            config = config_class(**accepted)
            break
        except Exception as error:  # strict dataclass errors, and ValueErrors of the classes
            reason = " ".join(str(error.__cause__ or error).split())
            field = re.search(r"Validation error for field '(\w+)'", str(error))
            if field and field[1] in accepted:
                problems.append(f"{file}: {field[1]}: {reason}")
                del accepted[field[1]]
                continue
            return None, [*problems, f"{file}: {reason}"]
    known = _known_keys(config_class)
    # A key of an older release that the class still converts does not become an attribute.
    unknown = [key for key in accepted if key not in known and key in vars(config)]
    for key in unknown:
        near = did_you_mean(key, known) or " Remove it."
        problems.append(f"{file}: {key}: {config_class.__name__} has no such key.{near}")
    return config, problems


def _known_keys(config_class: type["PretrainedConfig"]) -> set[str]:
    import dataclasses

    known = {field.name for field in dataclasses.fields(config_class)}
    known |= set(config_class().to_dict())
    known |= set(config_class.attribute_map) | set(config_class.attribute_map.values())
    return known | OBSOLETE_KEYS


def _contradictions(file: Path, config: "PretrainedConfig") -> list[str]:
    """Return the problems that transformers finds only in a forward pass, or never."""
    problems = []
    text_config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        problems.append(f"{file}: is_encoder_decoder: true, but only decoders can be trained.")
    elif config.model_type in ENCODERS and not config.is_decoder:
        problems.append(
            f"{file}: is_decoder: false, so every position would attend to the token it must "
            f"predict. Set it to true."
        )
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        value = getattr(text_config, key, None)
        if isinstance(value, int) and value < 1:
            problems.append(f"{file}: {key}: {value}, must be at least 1.")
    heads = getattr(text_config, "num_attention_heads", None)
    groups = getattr(text_config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        problems.append(
            f"{file}: num_key_value_heads: {groups}, must divide num_attention_heads, {heads}."
        )
    experts = _first_value(text_config, EXPERT_COUNT_KEYS)
    active = _first_value(text_config, EXPERTS_PER_TOKEN_KEYS)
    if experts and active and active > experts:
        problems.append(
            f"{file}: num_experts_per_tok: {active}, but there are only {experts} experts."
        )
    return problems
