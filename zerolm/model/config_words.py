"""Refuses words in a config.json that no code looks up: activations, kinds of layers, dtypes.

transformers passes some of these values on unchecked. An unknown kind of layer then counts as
another kind, and a dtype that is any other name of torch fails far from the file.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import did_you_mean
from zerolm.model.config_keys import declared_keys, family_files, names_read

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = ("dtype", "torch_dtype")
ROPE = ("rope_parameters", "rope_scaling")
# Values that are names of the user's own, or of other files.
FREE = re.compile(
    r"^_|languages?$|name_or_path$|_token$|_id$|label_names|tokenizer|version$|^init_device$"
)
NUMBER = re.compile(
    r"(<class '|'>|int|float|bool|None|[ |])+"
)  # types that the class checks itself
QUOTED = re.compile(r"""(["'`])([^"'`\s]+)\1""")
MLP_KINDS = "mlp_layer_types"


def word_problems(
    where: str, config_class: type["PretrainedConfig"], values: Mapping[str, Any]
) -> dict[str, str]:
    """Return {dotted key: line} for the values of a config.json that no code knows as a name.

    Args:
        where: the file, for messages.
    """
    problems = {}
    for prefix, part, given in _parts(config_class, values):
        files, types = family_files(part), {each.name: each.type for each in fields(part)}
        known, attention = _words(files), _attention_kinds()
        read = declared_keys(part) | names_read(files) | {*ROPE}
        for key in given.keys() & (read - declared_keys(_base())):
            if FREE.search(key) or NUMBER.fullmatch(str(types.get(key))):
                continue
            words = known - attention if key == MLP_KINDS else known
            for dotted, word in _strings(key, given[key]):
                if word not in words:
                    problems[f"{prefix}{dotted}"] = (
                        f"{where}: {prefix}{dotted}: {word!r} is not known to the code of "
                        f"{part.model_type}.{did_you_mean(word, words)} Correct the value."
                    )
        for key in DTYPES:
            if given.get(key) is not None and not _is_dtype(given[key]):
                problems[f"{prefix}{key}"] = (
                    f"{where}: {prefix}{key}: {given[key]!r} is not a floating-point dtype of "
                    f'torch. Use "float32" or "bfloat16", or remove the key.'
                )
    return problems


def _is_dtype(value: Any) -> bool:
    import torch

    if isinstance(value, dict):  # by part of the model
        return all(map(_is_dtype, value.values()))
    found = getattr(torch, value, None) if isinstance(value, str) else None
    return isinstance(found, torch.dtype) and found.is_floating_point


def _parts(
    config_class: type["PretrainedConfig"], values: Mapping[str, Any]
) -> Iterator[tuple[str, type["PretrainedConfig"], Mapping[str, Any]]]:
    """Yield (key prefix, class, values) for a config and its sub-configs."""
    yield "", config_class, {k: v for k, v in values.items() if k not in config_class.sub_configs}
    for name, part in config_class.sub_configs.items():
        if isinstance(given := values.get(name), dict) and hasattr(part, "model_type"):
            for prefix, inner, own in _parts(part, given):
                yield f"{name}.{prefix}", inner, own


def _strings(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, string) for the strings in a value."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _strings(f"{key}.{name}", each)
    elif isinstance(value, list):
        yield from dict.fromkeys(pair for each in value for pair in _strings(key, each))


def _base() -> type["PretrainedConfig"]:
    from transformers import PretrainedConfig

    return PretrainedConfig


@functools.cache
def _words(files: frozenset[Path]) -> frozenset[str]:
    """Return transformers' names of functions and layers, and the words quoted in a family's code
    and documentation.
    """
    from transformers import configuration_utils, modeling_rope_utils
    from transformers.activations import ACT2FN

    texts = [file.read_text(encoding="utf-8") for file in files]
    quoted = {found[2] for text in texts for found in QUOTED.finditer(text)}
    kinds = {
        *configuration_utils.ALLOWED_LAYER_TYPES,
        *getattr(configuration_utils, "_LEGACY_LAYER_TYPE_REMAP", ()),  # older names
    }
    ropes = {"default", *modeling_rope_utils.ROPE_INIT_FUNCTIONS}
    return frozenset(quoted | kinds | ropes | set(ACT2FN))


def _attention_kinds() -> frozenset[str]:
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    return frozenset(kind for kind in ALLOWED_LAYER_TYPES if "attention" in kind)
