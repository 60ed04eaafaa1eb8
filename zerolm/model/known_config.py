"""`KnownConfig`: a model's config that answers from what was read of it before.

transformers takes seconds to import. What `zerolm plan` reads of a config are some dozen values,
which follow from the file and the installed code. This stands in for the config: it remembers each
value that is read, and builds the config itself only for one that it does not know.
"""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What an attribute is: the first word of what is remembered of it.
VALUE, ABSENT, SAME, PART = "value", "absent", "same", "part"
METHODS = ("get_text_config", "to_json_string")
CLASS = "class of the config"


class KnownConfig:
    """Stands in for a config.

    Args:
        reads: what is known, {attribute: [word, value]}; a read adds to it.
        load: builds the config.
    """

    def __init__(self, reads: dict[str, list[Any]], load: "Callable[[], PretrainedConfig]"):
        self._reads, self._load = reads, load
        self._config: PretrainedConfig | None = None

    def actual(self) -> "PretrainedConfig":
        if self._config is None:
            self._config = self._load()
        return self._config

    def class_name(self) -> str:
        """Return the name of the config's class, with its module."""
        if CLASS not in self._reads:
            kind = type(self.actual())
            self._reads[CLASS] = [VALUE, f"{kind.__module__}.{kind.__qualname__}"]
        return str(self._reads[CLASS][1])

    def get_text_config(self) -> Any:
        return self._answer("get_text_config")

    def to_json_string(self) -> Any:
        return self._answer("to_json_string")

    @property
    def sub_configs(self) -> Any:
        """Names of the parts that are configs themselves, as keys."""
        return self._answer("sub_configs")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answer(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PretrainedConfig":
        return copy.deepcopy(self.actual(), memo)

    def _answer(self, name: str) -> Any:
        if name not in self._reads and (known := self._read(name)) is not None:
            self._reads[name] = known
        word, value = self._reads.get(name) or ("", {})
        if word == VALUE:
            return copy.deepcopy(value)
        if word == ABSENT:
            raise AttributeError(f"the config has no attribute {name!r}")
        if word == SAME:
            return self
        if word == PART:
            return KnownConfig(value, lambda: _of(self.actual(), name))
        return _of(self.actual(), name)

    def _read(self, name: str) -> list[Any] | None:
        """Return what to remember of an attribute; None if that can only be read itself."""
        from transformers import PretrainedConfig

        config = self.actual()
        try:
            value = _of(config, name)
        except AttributeError:
            return [ABSENT, None]
        if value is config:
            return [SAME, None]
        if isinstance(value, PretrainedConfig):
            return [PART, {}]
        if name == "sub_configs":
            value = dict.fromkeys(value)
        return [VALUE, copy.deepcopy(value)] if _is_plain(value) else None


def actual(config: Any) -> Any:
    """Return the config itself for one that may be a `KnownConfig`."""
    return config.actual() if isinstance(config, KnownConfig) else config


def _of(config: "PretrainedConfig", name: str) -> Any:
    value = getattr(config, name)
    return value() if name in METHODS else value


def _is_plain(value: Any) -> bool:
    """Return whether JSON writes a value and reads the same again."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            type(key) is str and _is_plain(each) for key, each in value.items()
        )
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
