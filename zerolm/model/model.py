"""`Model`: a model's config and parameter shapes, without weights.

torch and transformers are imported only inside functions. Must not depend on settings or DeepSpeed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zerolm.common import remembered
from zerolm.common.errors import ConfigError
from zerolm.common.files import sha256_file
from zerolm.common.remembered import recall
from zerolm.common.shipped import find_config
from zerolm.model import config_keys
from zerolm.model.architecture import (
    ConfigKey,
    causal_lm_class,
    decoder_blocks,
    has_padding_position,
    keys_with,
    meta_model,
    num_active_parameters,
    num_parameters,
    parameter_shapes,
)
from zerolm.model.config_file import MAX_SIZE, load_model_config
from zerolm.model.known_config import KnownConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names for a model's length limit, in addition to those in attribute maps.
POSITION_LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


@dataclass(frozen=True)
class Model:
    """A causal language model as its config.json describes it.

    Attributes:
        path: the config.json, for messages.
        shapes: {parameter name: shape}; tied parameters appear once.
        notices: lines about the file to show to the user.
        written: content of the file.
        idle: dotted keys of the file that `notices` name as having no effect.
    """

    path: str
    config: "PretrainedConfig"
    shapes: Mapping[str, tuple[int, ...]]
    notices: tuple[str, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()

    @classmethod
    def recalled(cls, path: str) -> "Model":
        """Do as `load`, without transformers if an earlier command has read the same file.

        The config is a `KnownConfig`, which nothing can be built from.
        """
        if not remembered.is_open():
            return cls.load(path)
        try:
            file = find_config(path)
            file = file / "config.json" if file.is_dir() else file
            inputs = [path, str(file), sha256_file(file)]
        except (OSError, ConfigError):
            return cls.load(path)  # says what is wrong
        loaded: list[Model] = []

        def load() -> Model:
            loaded.append(cls.load(path))
            return loaded[0]

        facts = remembered.recall("model", inputs, lambda: load().facts())
        reads: dict[str, Any] = remembered.recall("config", inputs, dict)
        before = json.dumps(reads)

        def keep() -> None:
            if json.dumps(reads) != before:
                remembered.remember("config", inputs, reads)

        remembered.at_close(keep)
        config: Any = KnownConfig(
            reads, lambda: loaded[0].config if loaded else load_model_config(path)
        )
        shapes = {name: tuple(shape) for name, shape in facts["shapes"]}
        return cls(
            path, config, shapes, tuple(facts["notices"]), facts["written"],
            frozenset(facts["idle"]),
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Return all but the path and the config, as JSON can write it."""
        return {
            "shapes": [[name, list(shape)] for name, shape in self.shapes.items()],
            "notices": list(self.notices), "written": dict(self.written), "idle": sorted(self.idle),
        }  # fmt: skip

    @classmethod
    def load(cls, path: str) -> "Model":
        """Read a config.json."""
        notices: list[str] = []
        written: dict[str, Any] = {}
        config = load_model_config(path, notices, written)
        try:
            with config_keys.recorded_reads() as read:
                shapes = parameter_shapes(config)
        except ConfigError as error:
            lines = [line.replace("model config", path, 1) for line in error.problems]
            raise ConfigError(lines) from error
        if problems := _size_problems(path, config, shapes):
            raise ConfigError(problems)
        idle = {*config_keys.idle_keys(config, written), *config_keys.unread_keys(config, written)}
        if unused := config_keys.unused_keys(config, written, read, causal_lm_class(config)):
            notices.append(
                f"{path}: keys of parts that this model does not have, or that no code reads, have "
                f"no effect: {', '.join(unused)}"
            )
        return cls(path, config, shapes, tuple(notices), written, frozenset({*idle, *unused}))

    @classmethod
    def from_config(cls, config: "PretrainedConfig", path: str = "model config") -> "Model":
        return cls(path, config, parameter_shapes(config))

    @cached_property
    def num_parameters(self) -> int:
        return num_parameters(self.shapes)

    @cached_property
    def num_active_parameters(self) -> int:
        """Number of parameters used for one token, excluding experts that do not process it."""
        return num_active_parameters(self.config, self.shapes)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Number of values in each parameter of the largest decoder block.

        Empty if there are no blocks, or if several blocks share a parameter.
        """
        inputs = ConfigKey.of(self.config).inputs()
        return recall("block-sizes", inputs, self._block_sizes, list, tuple)

    def _block_sizes(self) -> tuple[int, ...]:
        blocks = [list(block.parameters()) for block in decoder_blocks(meta_model(self.config))]
        parameters = [id(one) for block in blocks for one in block]
        if len(parameters) > len(set(parameters)):
            return ()
        sizes = [tuple(one.numel() for one in block) for block in blocks]
        return max(sizes, key=sum, default=())

    @property
    def vocab_size(self) -> int:
        size: int = self.config.get_text_config().vocab_size
        return size

    @property
    def hidden_size(self) -> int | None:
        return hidden_size(self.config)

    @property
    def max_positions(self) -> int | None:
        return max_positions(self.config)


def _size_problems(
    path: str, config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Refuse tables of positions or tokens that no machine could hold."""
    for name, shape in shapes.items():
        size = max(shape, default=0)
        if size > MAX_SIZE:
            keys = " and ".join(keys_with(config.to_dict(), size)) or "its sizes"
            return [
                f"{path}: {keys}: {name} would have the shape {list(shape)}, but at most "
                f"{MAX_SIZE:,} values in each dimension are supported. Correct the config.json."
            ]
    return []


def hidden_size(config: "PretrainedConfig") -> int | None:
    """Return the hidden size, or the largest if there are several, as in Hugging Face's Trainer."""
    text = config.get_text_config()
    size = getattr(text, "hidden_size", None)
    return size or max(getattr(text, "hidden_sizes", None) or [0]) or None


def max_positions(config: "PretrainedConfig") -> int | None:
    """Return the maximum length of a sequence, or None if the model has no limit."""
    limit = position_limit(config)
    return limit[1] - first_position(config) if limit else None


def position_limit(config: "PretrainedConfig") -> tuple[str, int] | None:
    """Return the key for the maximum number of positions and its value, or None if there is no
    limit.
    """
    text = config.get_text_config()
    limits = ((name, getattr(text, name, None)) for name in POSITION_LIMITS)
    return next(((name, value) for name, value in limits if value), None)


def first_position(config: "PretrainedConfig") -> int:
    """Return the index of the first token's row in the position table, which may not be 0.

    In RoBERTa-style families, positions begin after the table's padding row.
    """
    text = config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    return padding + 1 if padding is not None and has_padding_position(config) else 0
