"""Find the kinds of a model's layers, and kinds that a model has lost because it has few layers.

What a layer is depends on its number, by rules such as "every sixth layer has full attention": a
model of two layers may lack a kind that defines its family. Kinds are read from the config's lists
by layer and from the modules of the built model, not from names of families.
"""

import copy
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError
from zerolm.common.values import shown
from zerolm.model.architecture import ConfigKey, decoder_blocks, meta_model
from zerolm.model.model import Model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Features = dict[str, Any]
DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth"),
    *("decoder_layers", "num_decoder_layers"),
)
BY_LAYER = re.compile("layer|block|pattern")  # keys of lists with a value for each layer
NUMBERS = re.compile(r"(idx|index|layer_id|training)$")  # attributes with a layer's own number
MOST_KINDS = 8  # a feature with more values is no kind


def notices(model: Model) -> list[str]:
    """Report kinds of layers that the family has at its default depth, but not this model."""
    config = model.config
    try:
        deeper = _deeper(config)
        lost = _lost(_layers(ConfigKey.of(config)), deeper) if deeper else []
    except (ConfigError, TypeError, ValueError, AttributeError, KeyError):
        return []  # a class whose configs are not made from their values
    if deeper is None or not lost:
        return []
    key, depth = depth_of(config.get_text_config())
    _, default = depth_of(deeper.get_text_config())
    named = " and ".join(
        f"{name} {shown(value)} (from layer {first})" for name, value, first in lost
    )
    return [
        f"{model.path}: {key}: {depth}: too few for all kinds of layers of {config.model_type}: "
        f"with its default of {default} layers, some have {named}"
    ]


def layer_kinds(config: "PretrainedConfig") -> list[tuple[Any, ...]]:
    """Return for each layer the features that distinguish it from other layers of the model."""
    layers = _layers(ConfigKey.of(config))
    names = _distinguishing(layers)
    return [tuple(_value(layer, name) for name in names) for layer in layers]


@lru_cache(maxsize=16)
def _layers(key: ConfigKey) -> list[Features]:
    """Return the features of each layer: attributes and classes of its modules, and the values of
    lists in the config, which come first.
    """
    blocks = decoder_blocks(meta_model(key.config))
    layers: list[Features] = [{} for _ in blocks]
    for name, values in vars(key.config.get_text_config()).items():
        if isinstance(values, list | tuple) and len(values) == len(layers):
            for layer, value in zip(layers, values, strict=True):
                layer[name] = value if isinstance(value, str | bool | int) else str(value)
    for layer, block in zip(layers, blocks, strict=True):
        parts = list(block.named_modules())
        layer.update({f"class of {path or 'layer'}": type(part).__name__ for path, part in parts})
        for path, module in parts:
            for name, value in vars(module).items():
                is_plain = value is None or isinstance(value, bool | int | float | str)
                if is_plain and not name.startswith("_") and not NUMBERS.search(name):
                    layer[f"{path}.{name}"] = value
    return layers


def _distinguishing(layers: Sequence[Features]) -> list[str]:
    """Return the names of features that have a few different values."""
    most = min(MOST_KINDS, max(2, len(layers) - 1))
    names = dict.fromkeys(name for layer in layers for name in layer)
    return [name for name in names if 1 < len({_value(layer, name) for layer in layers}) <= most]


def _value(layer: Features, name: str) -> tuple[str, Any]:
    value = layer.get(name)
    return type(value).__name__, value  # 1 is not True


def _lost(layers: Sequence[Features], deeper: "PretrainedConfig") -> list[tuple[str, Any, int]]:
    """Return name, value and first layer of up to two features that only the deeper model has."""
    lost: dict[tuple[str, Any], tuple[str, Any, int]] = {}
    deep = _layers(ConfigKey.of(deeper))
    for name in _distinguishing(deep):
        known = {_value(layer, name) for layer in layers}
        for number, layer in enumerate(deep):
            value = layer.get(name)
            if value is not None and _value(layer, name) not in known:
                lost.setdefault((name, value), (name, value, number + 1))
    keys = vars(deeper.get_text_config())
    return [each for each in lost.values() if each[0] in keys][:2] or list(lost.values())[:2]


def _deeper(config: "PretrainedConfig") -> "PretrainedConfig | None":
    """Return the config with the default number of layers, or None if it has no fewer.

    If the lists by layer are not those that the class makes for this depth, they are intended.
    """
    text = config.get_text_config()
    key, depth = depth_of(text)
    _, default = depth_of(type(text)())
    if not 0 < depth < default or getattr(text, "is_heterogeneous", False):
        return None
    values = {name: value for name, value in text.to_dict().items() if name in vars(text)}
    lists = {
        name
        for name, value in values.items()
        if isinstance(value, list | tuple) and BY_LAYER.search(name) and len(value) == depth
    }
    bare = {name: value for name, value in values.items() if name not in lists}
    same = type(text)(**bare)
    if any(getattr(same, name, None) != getattr(text, name) for name in lists):
        return None
    deeper = type(text)(**{**bare, key: default})
    if text is config:
        return deeper
    whole = copy.deepcopy(config)
    name = next(name for name in type(config).sub_configs if getattr(config, name, None) is text)
    setattr(whole, name, deeper)
    return whole


def depth_of(text: "PretrainedConfig") -> tuple[str, int]:
    """Return the key for the number of layers and its value; "" and 0 if there is none."""
    found = ((key, vars(text).get(key)) for key in DEPTHS)
    return next(((key, value) for key, value in found if isinstance(value, int)), ("", 0))
