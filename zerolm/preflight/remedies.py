"""Find the keys of a model config that would fix a fault, by trying other values.

A fault is defined only by a test of the config; this module does not depend on its cause.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from zerolm.preflight.layer_kinds import DEPTHS
from zerolm.preflight.small_copy import AT_MOST, GROUPED_HEADS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_CANDIDATES = 24  # each candidate may take a second
MAX_KEYS = 2
SIZES = frozenset({*AT_MOST, *DEPTHS, *GROUPED_HEADS, "tie_word_embeddings", "use_cache", "dtype"})
POSITIONS = frozenset({"alibi"})  # another kind of positions is another model, so never advised
SMALL = 4  # for integers below this, the next integer is tried


@dataclass(frozen=True)
class Remedy:
    """A config key, dotted if nested, with its value and a value that fixes the fault."""

    key: str
    value: Any
    right: Any


def remedies(
    config: "PretrainedConfig", is_right: Callable[["PretrainedConfig"], bool]
) -> tuple[Remedy, ...]:
    """Try a limited number of config changes, and return those that each fix the fault by
    themselves.

    A key that the config leaves at its default is changed only if no other change helps, since it
    is not the cause. The result is the same on every rank, however fast the rank is.

    Args:
        is_right: returns whether a changed config is free of the fault; an error counts as the
            fault.
    """
    found: list[Remedy] = []
    for remedy, is_chosen in islice(_candidates(config), MAX_CANDIDATES):
        if len(found) == MAX_KEYS or (found and not is_chosen):
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
        except Exception:  # any class: other values may be invalid
            continue
    return tuple(found)


def _candidates(config: "PretrainedConfig") -> Iterator[tuple[Remedy, bool]]:
    """Yield keys with other values to try, and whether their value differs from their class's
    default; such keys come first.
    """
    text = config.get_text_config()
    later: list[Remedy] = []
    for key, value, default in _values("", text, _default(text)):
        own = [] if default == value else [Remedy(key, value, default)]
        if isinstance(value, bool):
            own += [Remedy(key, value, not value)] * (default is value)
        elif value == 0 or (isinstance(value, int) and 0 < value < SMALL):
            own.append(Remedy(key, value, value + 1))
        if default != value:
            yield from ((each, True) for each in own)
        else:
            later += own
    for each in sorted(later, key=lambda one: not isinstance(one.value, bool)):
        yield each, False


def _default(part: "PretrainedConfig") -> Any:
    try:
        return type(part)()
    except Exception:  # a class with required arguments
        return {}


def _values(prefix: str, part: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key, value and default of every number and boolean in a config."""
    from transformers import PretrainedConfig

    items, defaults = (each if isinstance(each, dict) else vars(each) for each in (part, default))
    for key, value in items.items():
        usual = defaults.get(key)
        if not isinstance(key, str) or key.startswith("_") or key.endswith("_token_id"):
            continue
        if key in SIZES | POSITIONS:
            continue
        if isinstance(value, dict | PretrainedConfig):
            yield from _values(f"{prefix}{key}.", value, {} if usual is None else usual)
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{key}", value, usual
