"""Find values of a config.json that change nothing in the model built from it.

A small copy of the model is built with and without each value that the file sets away from its
default. Values without any effect on the logits and on the initial weights are named: transformers
may ignore a key, or use another value in its place.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import Findings
from zerolm.common.values import shown
from zerolm.model import config_keys
from zerolm.model.architecture import EXPERT_COUNT_KEYS, ConfigKey, parameter_shapes
from zerolm.model.config_file import construct
from zerolm.model.config_words import ROPE
from zerolm.model.model import Model, max_positions
from zerolm.preflight.model_proof import LONGEST, TOKENS, kernels
from zerolm.preflight.remedies import SIZES
from zerolm.preflight.small_copy import small_copies

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    Values = dict[str, Any]

ABSENT = object()
OTHER_ACTIVATIONS = ("relu", "gelu")
FEW_TOKENS = 3  # in a window that matters in a row of a small copy
HEADS = (
    *("head_dim", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "rotary_dim",
)
TYPES = ("rope_type", "type")
# Kinds without frequencies of their own, and the kind that rows of training never use.
PLAIN = ("default", "dynamic", "mrope")


@dataclass(frozen=True)
class _Key:
    """A value that a file sets away from its default.

    Attributes:
        path: names from the file's top down to the value.
        default: the class's default; `ABSENT` if the class derives it from other keys.
    """

    path: tuple[str, ...]
    value: Any
    default: Any

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_rope(self) -> bool:
        return any(name in ROPE for name in self.path[:-1])


def check(model: Model, seq_len: int | None, found: Findings) -> None:
    """Refuse rotary embeddings that the model ignores, and name other values without an effect."""
    values = json.dumps(model.written)
    groups: dict[tuple[str, ...], list[_Key]] = {}
    for key in _idle(ConfigKey.of(model.config), values, model.idle, seq_len or TOKENS):
        groups.setdefault(key.path[:-1] if key.is_rope else key.path, []).append(key)
    for keys in groups.values():
        named = [f"{key.name}: {shown(key.value)}" for key in keys]
        have = "has" if len(keys) == 1 else "have"
        line = f"{model.path}: {', '.join(named)} {have} no effect on this model: a small copy has "
        default = keys[0].default
        them = "them" if len(keys) > 1 else "it"
        without = f"without {them}" if default is ABSENT else f"with {shown(default)}, the default"
        line += f"the same logits and initial weights {without}"
        kinds = _kinds_of_rope(model.config, keys[0])
        if kinds or any(key.path[-1] in TYPES for key in keys):
            entries = f"Give entries for {' and '.join(kinds)}, or remove" if kinds else "Remove"
            found.problems.append(f"{line}. {entries} {them}.")
        else:
            found.notices.append(line)


def _kinds_of_rope(config: "PretrainedConfig", key: _Key) -> list[str]:
    """Return the kinds of layers whose rotary embeddings differ, if a key gives values for all."""
    used = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [kind for kind, each in used.items() if isinstance(each, dict)]
    return kinds if key.is_rope and key.path[-2] in ROPE else []


@lru_cache(maxsize=64)
def _idle(key: ConfigKey, values: str, idle: frozenset[str], seq_len: int) -> tuple[_Key, ...]:
    from zerolm.preflight.observed_model import quiet

    written = json.loads(values)
    with quiet():
        keys = [
            each
            for each in _keys(key.config, written)
            if not any(".".join(each.path[:end]) in idle for end in range(1, len(each.path) + 1))
        ]
        if not keys:
            return ()
        try:
            trial = _Trial.of(key.config, written, seq_len)
        except Exception:  # reported by `model_proof`, which runs the same copies
            return ()
        live = {each.path for each in keys if trial.has_effect(each)}
    # A scaling by a factor of 1 has no effect, but its other values have.
    scaled = {path[:-1] for path in live if path[-1] != "rope_theta"}
    return tuple(
        each
        for each in keys
        if each.path not in live and not (each.path[-1] in TYPES and each.path[:-1] in scaled)
    )


def _keys(config: "PretrainedConfig", written: Mapping[str, Any]) -> Iterator[_Key]:
    import transformers

    general = config_keys.declared_keys(transformers.PretrainedConfig) - {"tie_word_embeddings"}
    skipped = general | (SIZES - {"tie_word_embeddings"}) | {*EXPERT_COUNT_KEYS}
    skipped |= {*config_keys.ROUTER_COEFFICIENTS, "output_router_logits"}
    text = config.get_text_config()
    for prefix, part, given in config_keys.parts(config, written):
        if part is not config and part is not text:
            continue
        path = tuple(prefix.split(".")[:-1])
        for name, value in given.items():
            if name in ROPE and isinstance(value, dict):
                older = name == "rope_scaling" and isinstance(given.get("rope_parameters"), dict)
                yield from _rope_keys((*path, name), {} if older else value)
            elif name not in skipped and _is_value(value) and not _is_repeated(name, value, given):
                own = type(part).attribute_map.get(name, name)
                default = getattr(type(part), own, None)
                default = ABSENT if default is None else default
                stated = default is ABSENT and not value  # 0, false: usually the same as no value
                is_other = default != value and not stated
                if is_other and not name.endswith("_token_id") and name[0] != "_":
                    yield _Key((*path, name), value, default)


def _rope_keys(path: tuple[str, ...], value: Mapping[str, Any]) -> Iterator[_Key]:
    """Yield the values of rotary embeddings that are not those of plain frequencies."""
    repeated = {"type"} if "rope_type" in value else set()
    for name, each in value.items():
        neutral = each in PLAIN or (name, each) == ("partial_rotary_factor", 1.0)
        if isinstance(each, dict):
            yield from _rope_keys((*path, name), each)
        elif isinstance(each, bool | int | float | str) and not neutral and name not in repeated:
            yield _Key((*path, name), each, ABSENT)


def _is_value(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 1 and all(isinstance(each, str | int) for each in value)
    return isinstance(value, bool | int | float | str)


def _is_repeated(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Return whether `rope_parameters` has the value of an older key too, as in exports."""
    used = given.get("rope_parameters")
    return (
        isinstance(used, dict)
        and ("rope" in name or "rotary" in name)
        and (
            any(value in each.values() for each in (used, *used.values()) if isinstance(each, dict))
        )
    )


@dataclass(frozen=True)
class _Trial:
    """A small copy of the model, with large weights.

    Attributes:
        number: which of the `small_copies` it is.
        model: the copy; `logits` are those of `ids`.
        initial: its initial weights.
    """

    config: "PretrainedConfig"
    written: "Values"
    shapes: Mapping[str, tuple[int, ...]]
    number: int
    tokens: int
    model: Any
    logits: Any
    initial: "Values"

    @classmethod
    def of(cls, config: "PretrainedConfig", written: "Values", seq_len: int) -> "_Trial":
        from zerolm.preflight import observed_model

        error: Exception | None = None
        shapes, kernel = parameter_shapes(config), kernels(config)[0]
        short = min(TOKENS, max_positions(config) or TOKENS)
        for number, small in enumerate(_copies(config, shapes)):
            for tokens in dict.fromkeys((short, min(seq_len, LONGEST))):
                try:
                    model = observed_model.build(small, kernel)
                    initial = {name: value.clone() for name, value in model.state_dict().items()}
                    observed_model.enlarge(model)
                    logits = observed_model.logits(model, tokens)
                except Exception as caught:
                    error = error or caught
                    continue
                return cls(config, written, shapes, number, tokens, model, logits, initial)
        assert error is not None, "there is a small copy"
        raise error

    def has_effect(self, key: _Key) -> bool:
        """Return whether any other value of a key gives another model."""
        tried = 0
        for value in _others(key):
            changed, problems = construct("", type(self.config), _changed(self.written, key, value))
            if changed is None or problems:
                continue
            try:
                if not self._is_same(changed):
                    return True
            except Exception:  # a value that some code reads, but cannot use
                return True
            tried += 1
        return not tried

    def _is_same(self, changed: "PretrainedConfig") -> bool:
        from zerolm.preflight import observed_model

        kernel = kernels(changed)[0]
        small = next(islice(_copies(changed, self.shapes), self.number, None), None)
        if small is None:
            return False
        model = observed_model.with_weights_of(self.model, small, kernel)
        if model is None or not observed_model.logits(model, self.tokens).equal(self.logits):
            return False
        weights = observed_model.build(small, kernel).state_dict()
        return all(weights[name].equal(value) for name, value in self.initial.items())


def _copies(
    config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]]
) -> Iterator["PretrainedConfig"]:
    """Yield configs of small copies with the model's own heads and initial range if possible.

    In narrow heads, some frequencies of rotary embeddings would be the same with other values.
    """
    given: Any = config.get_text_config()
    for each in small_copies(config, shapes):
        text: Any = each.config.get_text_config()
        if getattr(given, "initializer_range", None) is not None:
            text.initializer_range = given.initializer_range
        if not each.same_widths and not getattr(text, "is_heterogeneous", False):
            wide = copy.deepcopy(each.config)
            for name in {*HEADS, "rope_parameters"} & vars(text).keys():
                setattr(wide.get_text_config(), name, copy.deepcopy(getattr(given, name)))
            yield wide
        yield each.config


def _changed(written: "Values", key: _Key, value: Any) -> "Values":
    values = copy.deepcopy(written)
    part = values
    for name in key.path[:-1]:
        part = part[name]
    if value is ABSENT:
        del part[key.path[-1]]
        if key.path[-1] in TYPES:
            for name in TYPES:
                part.pop(name, None)
    else:
        part[key.path[-1]] = value
    return values


def _others(key: _Key) -> Iterator[Any]:
    """Yield the values that must all give the same model if a key has no effect.

    Where the class has a default, the value without an effect is that of the file; a window that is
    longer than the copy's rows must be shortened to tell. Where the default depends on other keys,
    the file may just state it, so other values are tried. A 0 that gives the same model as no value
    was taken for none.
    """
    yield ABSENT
    value = key.value
    if isinstance(value, str):
        if "act" in key.path[-1]:
            yield next(each for each in OTHER_ACTIVATIONS if each != value)
    elif isinstance(value, list):
        if value[::-1] != value:
            yield value[::-1]
    elif isinstance(value, bool):
        if key.default is ABSENT:
            yield not value
    elif isinstance(value, int) and value > FEW_TOKENS and len(key.path) == 1:
        yield FEW_TOKENS
    elif key.default is ABSENT and value:
        yield type(value)(value / 16) or value + 1
        yield value * 16
