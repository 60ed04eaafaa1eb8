"""Finds the keys of a config.json that no code of transformers reads.

Config classes accept any key, and modeling code reads many that the class does not declare, such as
`getattr(config, "head_dim", None)`. So the keys that count are collected from the source of the
model's family. torch is not imported here.
"""

import ast
import difflib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A key is taken for a typing error of another one if it differs in one word of at least this length
# and similarity: hidden_sise, n_layers for n_layer. Published files have ep_size beside tp_size.
SHORTEST_WORD = 4
SIMILAR_WORD = 0.75
# Keys about a published checkpoint. They are not given to the config class: they would be exported
# with the trained weights, which are not quantised and come without code.
OF_THE_CHECKPOINT = {
    "auto_map": "code of the model, which is never executed",
    "quantization_config": "training uses unquantised weights",
}
# Keys that only change what a forward pass returns, with the value that a run needs.
OF_THE_OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
# Sizes, and how other families and older code call them. A class that knows another name only would
# take its default: the file of a small model would give one of another size.
OTHER_NAMES_OF_SIZES = {
    "hidden_size": frozenset({"hidden_size", "d_model", "n_embd", "n_embed", "dim", "model_dim"}),
    "num_hidden_layers": frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers"}),
    "num_attention_heads": frozenset({"num_attention_heads", "n_head", "n_heads", "num_heads"}),
    "num_key_value_heads": frozenset(
        {"num_key_value_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "num_kv_heads"}
    ),
}
ATTRIBUTE_CALLS = frozenset({"getattr", "hasattr", "setattr"})
DICTIONARY_METHODS = frozenset({"get", "pop", "setdefault"})


def unread_keys(config: "PretrainedConfig", values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the keys of a config.json that nobody reads.

    Args:
        values: the file's content, from which `config` was constructed.

    Returns:
        {dotted key: the key that was meant, by a typing error or by the name of a size in another
        family, or None}.
    """
    unread: dict[str, str | None] = {}
    for prefix, part, given in _parts(config, values):
        declared = _declared(type(part))
        # A key that the class converts does not become an attribute.
        candidates = [key for key in given if key not in declared and key in vars(part)]
        if not candidates:
            continue
        family, imported = _sources(Path(inspect.getfile(type(part))).parent)
        counting = declared | _keys_in_all(family)
        read = counting | _keys_in_all(imported)
        for key in candidates:
            if key not in read and not key.startswith("_"):
                meant = (other for other in counting if _is_typing_error(key, other))
                unread[prefix + key] = next(meant, None) or _size_meant(key, part, given)
    return unread


def _parts(
    config: "PretrainedConfig", values: Mapping[str, Any]
) -> Iterator[tuple[str, "PretrainedConfig", Mapping[str, Any]]]:
    """Yield the config and its sub-configs: prefix of the keys, config, values."""
    yield "", config, values
    for name in type(config).sub_configs:
        part = getattr(config, name, None)
        if part is not None and isinstance(values.get(name), dict):
            for prefix, inner, given in _parts(part, values[name]):
                yield f"{name}.{prefix}", inner, given


def _declared(config_class: type["PretrainedConfig"]) -> set[str]:
    import dataclasses

    declared = {field.name for field in dataclasses.fields(config_class)}
    declared |= set(config_class.attribute_map) | set(config_class.attribute_map.values())
    return declared | {"model_type"}


def _size_meant(key: str, part: "PretrainedConfig", given: Mapping[str, Any]) -> str | None:
    """Return the class's name of a size that is given under another name only.

    None if its default is the same.
    """
    attribute_map = type(part).attribute_map
    for size, names in OTHER_NAMES_OF_SIZES.items():
        own = attribute_map.get(size, size)
        known = {size, own, *(name for name in names if attribute_map.get(name) == own)}
        if key in names and hasattr(part, size) and not known & given.keys():
            return own if getattr(part, size) != given[key] else None
    return None


def _is_typing_error(key: str, other: str) -> bool:
    if key.replace("_", "").lower() == other.replace("_", "").lower():
        return True
    words, others = key.split("_"), other.split("_")
    different = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    if len(words) != len(others) or len(different) != 1:
        return False
    (word, meant) = different[0]
    similar = difflib.SequenceMatcher(None, word, meant).ratio() >= SIMILAR_WORD
    return similar and max(len(word), len(meant)) >= SHORTEST_WORD


@functools.cache
def _sources(folder: Path) -> tuple[frozenset[Path], frozenset[Path]]:
    """Return the source files of a model family, and the modules of transformers they import."""
    import transformers

    package = Path(inspect.getfile(transformers)).parent
    family = {*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")}
    imported = {file for source in family for file in _imports(source, package)}
    return frozenset(family), frozenset(imported)


def _keys_in_all(files: Iterable[Path]) -> frozenset[str]:
    return frozenset().union(*map(_keys_in, files))


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imports(file: Path, package: Path) -> Iterator[Path]:
    """Yield the modules of transformers that a module imports at its top level."""
    for node in _tree(file).body:
        if not (isinstance(node, ast.ImportFrom) and node.level):
            continue
        folder = file.parents[node.level - 1]
        base = folder.joinpath(*node.module.split(".")) if node.module else folder
        inner = (base / f"{alias.name}.py" for alias in node.names)
        for candidate in (base.with_suffix(".py"), *inner):
            if candidate.is_file() and package in candidate.parents:
                yield candidate


@functools.cache
def _keys_in(file: Path) -> frozenset[str]:
    """Return the names that a module reads from configs and from keyword arguments."""
    # modeling_rope_utils has a base class of all configs, besides the functions that read them.
    is_config = file.name.startswith(("configuration_", "modeling_rope_utils"))
    found = set()
    for node in ast.walk(_tree(file)):
        match node:
            case ast.Attribute(value=owner, attr=name) if _holds_keys(owner, is_config):
                found.add(name)
            case ast.Call(func=ast.Name(id=call), args=[owner, ast.Constant(value=str(name)), *_]):
                if call in ATTRIBUTE_CALLS and _holds_keys(owner, is_config):
                    found.add(name)
            case ast.Call(func=ast.Attribute(value=owner, attr=call), args=[first, *_]):
                if call in DICTIONARY_METHODS and _holds_keys(owner, is_config):
                    found.update(_strings(first))
            case ast.Subscript(value=owner, slice=key) if _holds_keys(owner, is_config):
                found.update(_strings(key))
            case ast.Compare(left=left, comparators=[owner]) if _holds_keys(owner, is_config):
                found.update(_strings(left))
            case ast.FunctionDef(name="__init__" | "__post_init__", args=arguments) if is_config:
                found.update(each.arg for each in arguments.args + arguments.kwonlyargs)
    return frozenset(found)


def _holds_keys(node: ast.expr, is_config: bool) -> bool:
    """Return whether an expression is a config, or a dictionary of its keys, by its name."""
    if isinstance(node, ast.Call):  # config.get_text_config()
        node = node.func
    name = getattr(node, "id", None) or getattr(node, "attr", None) or ""
    return name.endswith(("config", "kwargs")) or (is_config and name in ("self", "cls"))


def _strings(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
