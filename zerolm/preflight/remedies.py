"""Finds the keys of a model config whose other value would end a fault, by trying them.

A fault is any test of a config; which keys can cause it is not known here.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from zerolm.preflight.small_copy import AT_MOST, DEPTHS, GROUPED_HEADS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_CANDIDATES = 24  # each may take a second
MAX_KEYS = 2
SIZES = frozenset({*AT_MOST, *DEPTHS, *GROUPED_HEADS, "tie_word_embeddings", "use_cache", "dtype"})
SMALL = 4  # a count up to which one more is tried


@dataclass(frozen=True)
class Remedy:
    """A key of a config, dotted in a nested object, with its value and one that is right."""

    key: str
    value: Any
    right: Any


def remedies(
    config: "PretrainedConfig", is_right: Callable[["PretrainedConfig"], bool]
) -> tuple[Remedy, ...]:
    """Return keys each of which alone ends a fault, of a limited number of candidates.

    The same on every rank, whatever its speed.

    Args:
        is_right: whether a changed config does not have the fault; any error means that it has.
    """
    found: list[Remedy] = []
    for remedy in islice(_candidates(config), MAX_CANDIDATES):
        if len(found) == MAX_KEYS:
            break
        if any(remedy.key == known.key for known in found):
            continue
        changed = deepcopy(config)
        try:
            *path, last = remedy.key.split(".")
            part: Any = changed.get_text_config()
            for name in path:
                part = part[name] if isinstance(part, dict) else getattr(part, name)
            if isinstance(part, dict):
                part[last] = remedy.right
            else:
                setattr(part, last, remedy.right)
            if is_right(changed):
                found.append(remedy)
        except Exception:  # of any class: other values may be impossible
            continue
    return tuple(found)


def _candidates(config: "PretrainedConfig") -> Iterator[Remedy]:
    """Yield other values of keys, first of those that differ from the default of their class."""
    text = config.get_text_config()
    later: list[Remedy] = []
    for key, value, default in _values("", text, _default(text)):
        own = [] if default == value else [Remedy(key, value, default)]
        if isinstance(value, bool):
            own += [Remedy(key, value, not value)] * (default is value)
        elif isinstance(value, int) and 0 <= value < SMALL:
            own.append(Remedy(key, value, value + 1))
        if default != value:
            yield from own
        else:
            later += own
    yield from sorted(later, key=lambda one: not isinstance(one.value, bool))


def _default(part: "PretrainedConfig") -> Any:
    try:
        return type(part)()
    except Exception:  # a class that needs values
        return {}


def _values(prefix: str, part: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value and default of all numbers and switches."""
    from transformers import PretrainedConfig

    items, defaults = (each if isinstance(each, dict) else vars(each) for each in (part, default))
    for key, value in items.items():
        usual = defaults.get(key)
        if not isinstance(key, str) or key.startswith("_") or key.endswith("_token_id"):
            continue
        if key in SIZES:
            continue
        if isinstance(value, dict | PretrainedConfig):
            yield from _values(f"{prefix}{key}.", value, {} if usual is None else usual)
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{key}", value, usual
