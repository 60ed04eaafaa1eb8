"""Finds keys that have no effect in a config.json.

Config classes declare their keys but accept any others. Some undeclared keys are read by name, as
in `getattr(config, "head_dim", None)`, so a key mentioned in the source of the model's family is
assumed to be read. Other keys are read only with certain values of further keys. torch is not
imported here.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.values import shown
from zerolm.engine import replaced

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A key is considered a misspelling of another if it differs in one word with at least this length
# and similarity: hidden_sise, n_layers for n_layer. Published files contain both ep_size and
# tp_size.
SHORTEST_WORD = 4
SIMILAR_WORD = 0.75
# Keys about a published checkpoint. These keys are not passed to the config class; otherwise, they
# would be exported with the trained weights, which are not quantised and come without code.
OF_THE_CHECKPOINT = {
    "auto_map": "the model's code, which is never executed",
    "quantization_config": "training uses unquantised weights",
}
# Keys that only change what a forward pass returns, with the value that a run needs.
OF_THE_OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
# Names of sizes, and the names for the same sizes in other families and older code. A class that
# supports only another name would use its default size, so the file of a small model would define a
# model of a different size.
OTHER_NAMES_OF_SIZES = {
    "hidden_size": frozenset({"hidden_size", "d_model", "n_embd", "n_embed", "dim", "model_dim"}),
    "num_hidden_layers": frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers"}),
    "num_attention_heads": frozenset({"num_attention_heads", "n_head", "n_heads", "num_heads"}),
    "num_key_value_heads": frozenset(
        {"num_key_value_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "num_kv_heads"}
    ),
}
# Modules in transformers that read keys for all model families.
GENERAL_MODULES = (
    *("cache_utils.py", "configuration_utils.py", "generation/utils.py", "integrations/moe.py"),
    *("loss/loss_utils.py", "masking_utils.py", "modeling_rope_utils.py", "modeling_utils.py"),
)
READ = re.compile(r"""(?:config|kwargs)(?:\(\))?\.(\w+)|["'](\w+)["']""")  # config.NAME, "NAME"
READ_IN_CONFIGS = re.compile(r"""(?:config|kwargs|self|cls)\.(\w+)|["'](\w+)["']""")
COMMENT = re.compile(r"^ *#.*", re.MULTILINE)
CONSTRUCTOR = re.compile(r"^( +)def __init__\b.*\n(?:(?:\1[ )].*)?\n)*", re.MULTILINE)
OF_OTHER_MODELS = ("classifier", "summary")  # heads that a causal language model does not have
BUILT_LATER = frozenset({"big_bird"})  # layers replace their attention in the forward pass
ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")


def unread_keys(config: "PretrainedConfig", values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the keys of a config.json that no code reads.

    Args:
        values: the file's content, from which `config` was constructed.

    Returns:
        {dotted key: the key that was probably meant (after a misspelling or another family's name
        for a size), or None}.
    """
    unread: dict[str, str | None] = {}
    for prefix, part, given in parts(config, values):
        declared = declared_keys(type(part))
        # Keys converted by the class do not become attributes.
        candidates = [key for key in given if key not in declared and key in vars(part)]
        if not candidates:
            continue
        read = names_read(family_files(type(part)))
        # `idle_keys` covers the outer config's copies of these keys.
        text = getattr(part, "text_config", None)
        for key in candidates:
            if key not in read and not key.startswith("_") and not hasattr(text, key):
                meant = (other for other in declared if _is_typing_error(key, other))
                unread[prefix + key] = next(meant, None) or _size_meant(key, part, given)
    return unread


def idle_keys(config: "PretrainedConfig", values: Mapping[str, Any]) -> dict[str, str]:
    """Return {dotted key: reason} for keys that other keys disable.

    Args:
        values: the file's content, from which `config` was constructed.
    """
    text = config.get_text_config()
    idle: dict[str, str] = {}
    for prefix, part, given in parts(config, values):
        if getattr(part, "is_heterogeneous", False):  # a key may have one value per layer
            continue
        found = _router_keys(text, part, given) | _window_keys(part, given)
        found |= _rope_keys(part, given)
        found |= _replaced_keys(part, given)
        if part is config and text is not config:
            misplaced = (declared_keys(type(text)) - declared_keys(type(config))) & given.keys()
            found |= {
                key: "it belongs in text_config"
                for key in misplaced
                if getattr(text, key, None) != given[key]
            }
        one_head = getattr(part, "new_decoder_architecture", None) is False and part.multi_query
        if one_head and given.get("num_kv_heads") not in (None, 1):
            found["num_kv_heads"] = "new_decoder_architecture is false, and multi_query true"
        for key in ("floor_scale", "attn_scale"):
            if key in given and not getattr(part, "attn_temperature_tuning", True):
                found[key] = "attn_temperature_tuning is false"
        if given.get("z_loss_coefficient"):
            found["z_loss_coefficient"] = "in a run, --z_loss sets it"
        idle |= {prefix + key: reason for key, reason in found.items()}
    return idle


def _is_chosen(part: "PretrainedConfig", given: Mapping[str, Any], key: str, switch: str) -> bool:
    """Return whether a file sets a key deliberately; files written by transformers contain all
    keys.
    """
    is_default = getattr(type(part), key, None) == given.get(key)
    return bool(given.get(key)) and not (is_default and switch in given)


def _router_keys(
    text: "PretrainedConfig", part: "PretrainedConfig", given: Mapping[str, Any]
) -> dict[str, str]:
    if getattr(text, "output_router_logits", None) is False:
        why = "output_router_logits is false, so the run has no router loss"
        keys = ROUTER_COEFFICIENTS
        return {key: why for key in keys if _is_chosen(part, given, key, "output_router_logits")}
    zero = [key for key in ROUTER_COEFFICIENTS if getattr(text, key, None) == 0]
    is_given = given.get("output_router_logits") is True
    return {"output_router_logits": f"{zero[0]} is 0"} if zero and is_given else {}


def _window_keys(part: "PretrainedConfig", given: Mapping[str, Any]) -> dict[str, str]:
    """Find sliding-window keys for a model in which all layers use full attention."""
    kinds = getattr(part, "layer_types", None)
    if not kinds or any("full" not in str(kind) for kind in kinds):
        return {}
    first = getattr(part, "max_window_layers", None)
    if getattr(part, "use_sliding_window", None) is False:
        why = "use_sliding_window is false"
    elif "layer_types" not in given and isinstance(first, int) and first >= len(kinds):
        why = f"max_window_layers {first} is not below the {len(kinds)} layers"
    else:
        why = "layer_types has no sliding layer"
    keys = ("sliding_window", "use_sliding_window", "sliding_window_pattern")
    switch = "use_sliding_window" if hasattr(part, "use_sliding_window") else "layer_types"
    return {key: why for key in keys if hasattr(part, key) and _is_chosen(part, given, key, switch)}


def _rope_keys(part: "PretrainedConfig", given: Mapping[str, Any]) -> dict[str, str]:
    """Find rotary position values that the class has replaced by the value of another key."""
    written = ("rope_theta", "rope_scaling", "rope_parameters")
    if getattr(part, "alibi", False) is True:
        return {key: "alibi is true" for key in written if given.get(key)}
    used = getattr(part, "rope_parameters", None)
    if not isinstance(used, dict) or any(isinstance(each, dict) for each in used.values()):
        return {}
    idle = {}
    for key in written:
        value = given.get(key)
        items = value if isinstance(value, dict) else {key: value}
        for name, each in items.items():
            name = "rope_type" if name == "type" else name
            if isinstance(each, str | int | float) and used.get(name, each) != each:
                idle[key] = f"another key sets {name} to {shown(used[name])}"
    return idle


def _replaced_keys(part: "PretrainedConfig", given: Mapping[str, Any]) -> dict[str, str]:
    """Find declared keys whose value in the config differs from the file."""
    return {
        key: f"{type(part).__name__} makes it {shown(found)}"
        for key in declared_keys(type(part)) & given.keys()
        if isinstance(given[key], bool | int | float | str)
        and isinstance(found := getattr(part, key, None), bool | int | float | str)
        and found != given[key]
    }


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Inside this context, collect the names of keys that are read from configs."""
    from transformers import PretrainedConfig

    read: set[str] = set()
    original = PretrainedConfig.__getattribute__

    def get(config: "PretrainedConfig", name: str) -> Any:
        read.add(name)
        return original(config, name)

    with replaced.installed(PretrainedConfig, "__getattribute__", get):
        yield read


def unused_keys(
    config: "PretrainedConfig", values: Mapping[str, Any], read: set[str], model_class: type
) -> list[str]:
    """Return the dotted keys with non-default values that were not read while the model was built.

    Such keys are sizes of parts that the model lacks, such as the MLP in a model with experts in
    every layer. Keys that are also read outside constructors are excluded.

    Args:
        values: the file's content, from which `config` was constructed.
        read: names that were read while building the model.
    """
    import transformers

    package = Path(inspect.getfile(transformers)).parent
    general = names_read(frozenset(package / name for name in GENERAL_MODULES))
    unused: list[str] = []
    text = config.get_text_config()
    for prefix, part, given in parts(config, values):
        other = text is not config and part is not config and part is not text
        if other or part.model_type in BUILT_LATER:
            continue
        files = family_files(type(part)) | family_files(model_class)
        used = read | general | names_read(files, constructors=False)
        used |= declared_keys(transformers.PretrainedConfig)
        aliases = type(part).attribute_map
        for key in sorted(declared_keys(type(part)) & given.keys()):
            names = {key, aliases.get(key, key), *(n for n in aliases if aliases[n] == key)}
            is_default = getattr(type(part), aliases.get(key, key), None) == given[key]
            is_value = isinstance(given[key], bool | int | float | str)
            is_other = key.startswith(OF_OTHER_MODELS) or "_token_" in key
            if is_value and not is_other and not is_default and not names & used:
                unused.append(prefix + key)
    return unused


def parts(
    config: "PretrainedConfig", values: Mapping[str, Any]
) -> Iterator[tuple[str, "PretrainedConfig", Mapping[str, Any]]]:
    """Yield (key prefix, config, values in the file) for the config and each of its sub-configs."""
    yield "", config, values
    for name in type(config).sub_configs:
        part = getattr(config, name, None)
        if part is not None and isinstance(values.get(name), dict):
            for prefix, inner, given in parts(part, values[name]):
                yield f"{name}.{prefix}", inner, given


def declared_keys(config_class: type["PretrainedConfig"]) -> set[str]:
    import dataclasses

    declared = {field.name for field in dataclasses.fields(config_class)}
    declared |= set(config_class.attribute_map) | set(config_class.attribute_map.values())
    return declared | {"model_type"}


def _size_meant(key: str, part: "PretrainedConfig", given: Mapping[str, Any]) -> str | None:
    """Return the class's name for a size that the file gives only under another name.

    Returns None if the class's default is the same size.
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


def family_files(of_family: type) -> frozenset[Path]:
    """Return the source files of the model family to which a class belongs."""
    folder = Path(inspect.getfile(of_family)).parent
    return frozenset((*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")))


@functools.cache
def names_read(files: frozenset[Path], *, constructors: bool = True) -> frozenset[str]:
    """Return the names that source files read from configs, and all quoted words.

    Args:
        constructors: whether to include reads in a model's constructors.
    """
    names: set[str] = set()
    for file in files:
        text = COMMENT.sub("", file.read_text(encoding="utf-8"))
        # modeling_rope_utils contains a base class of all configs, and the functions that read
        # them.
        is_config = file.name.startswith(("configuration_", "modeling_rope_utils"))
        if not (constructors or is_config):
            text = CONSTRUCTOR.sub("", text)
        for pair in (READ_IN_CONFIGS if is_config else READ).findall(text):
            names.update(pair)
    return frozenset(names)
