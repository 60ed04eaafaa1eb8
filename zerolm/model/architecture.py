"""Finds a model's class, and counts its parameters on the meta device.

Allocates no weights and starts no process group. torch and transformers are imported inside
functions to keep `--help` fast. Must not depend on DeepSpeed, data or settings.
"""

import copy
import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError, reason
from zerolm.common.family_sources import family_digest
from zerolm.model.known_config import KnownConfig, actual

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
# A Llama block has 22; the largest default config of a model family in transformers has 3,500. At
# the limit, a Llama with 680 blocks, `--check` takes 13 core-seconds (AMD EPYC, 2026-11).
MAX_PARTS = 15_000
ROUTED_EXPERT = re.compile(r"\bexperts\b")


def causal_lm_class(config: "PretrainedConfig") -> type["PreTrainedModel"]:
    """Return the class that `AutoModelForCausalLM.from_config` builds."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any
    config = actual(config)
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ConfigError(
            f"model config: model_type {config.model_type!r} has no causal language model."
        ) from None
    return model_class[0] if isinstance(model_class, tuple) else model_class


def meta_model(
    config: "PretrainedConfig", frozen_rows: set[int] | None = None
) -> "PreTrainedModel":
    """Build the model on the meta device, where tensors have shapes but no memory. Does not change
    the config.

    Args:
        frozen_rows: receives the result of `train_every_row`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    causal_lm_class(config)
    try:
        with torch.device("meta"), _limited_size():
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                attn_implementation="eager",  # this machine may lack kernels named in the config
                trust_remote_code=False,
            )
    except ConfigError:
        raise
    except Exception as error:  # any exception type: transformers does not validate all values
        problem = reason(error)
        if isinstance(error, KeyError) and (keys := keys_with(config.to_dict(), error.args[0])):
            problem = f"{' and '.join(keys)}: {error} is not known"
        raise ConfigError(
            f"model config: a {config.model_type!r} model cannot be built from these values "
            f"({problem}). Correct the config.json."
        ) from error
    rows = train_every_row(model)
    if frozen_rows is not None:
        frozen_rows |= rows
    return model


@contextmanager
def _limited_size() -> Iterator[None]:
    """Refuse a model that is too large while it is being built. Limits on single keys would miss
    products such as layers times experts.
    """
    from torch.nn.modules import module

    parts = itertools.count(1)

    def count(*_: Any) -> None:
        if next(parts) > MAX_PARTS:
            raise ConfigError(
                f"model config: the model has more than {MAX_PARTS:,} modules and parameters. Use "
                f"fewer layers or experts."
            )

    handles = (
        module.register_module_module_registration_hook(count),
        module.register_module_parameter_registration_hook(count),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train_every_row(model: "PreTrainedModel") -> set[int]:
    """Make a model train the embedding row of its padding token; return the rows that it would
    otherwise not train.

    Pretraining uses no padding: the padding id is that of an ordinary token, often EOS.
    """
    import torch

    rows = set()
    for module in model.modules():
        is_table = isinstance(module, torch.nn.Embedding) and module.padding_idx is not None
        # ProphetNet computes positions from the padding id, and its positions begin after that row.
        if is_table and not type(module).__name__.endswith("PositionalEmbeddings"):
            rows.add(module.padding_idx)
            module.padding_idx = None
    return rows


def has_padding_position(config: "PretrainedConfig") -> bool:
    """Return whether positions begin after `pad_token_id`, as in RoBERTa-style families."""
    parts = vars(sys.modules[causal_lm_class(config).__module__]).items()
    return any(
        name.endswith("Embeddings") and hasattr(part, "create_position_ids_from_input_ids")
        for name, part in parts
    )


def keys_with(values: Mapping[str, Any], wanted: Any) -> list[str]:
    """Return the keys with a given value; a key in a nested object is returned as `a.b`."""
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += [f"{key}.{inner}" for inner in keys_with(value, wanted)]
        elif type(value) is type(wanted) and value == wanted:
            found.append(key)
    return found


def constructor_values(
    config: "PretrainedConfig", names: Sequence[str], seed: int
) -> dict[str, "torch.Tensor"]:
    """Return the values that constructors assign to the named parameters, in float32 on the CPU.

    Constructs the model again, with only tensors up to the size of the largest named one on the
    CPU. Does not change the state of torch's global generator.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.initialization import no_tie_weights

    if not names:
        return {}
    shapes = parameter_shapes(config)
    largest = max(math.prod(shapes.get(name, ())) for name in names)

    class SmallTensorsOnTheCpu(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = kwargs or {}
            result = function(*args, **given)
            created = isinstance(result, torch.Tensor) and result.is_meta and "device" in given
            converted = any(isinstance(value, torch.Tensor) for value in args)
            if created and not converted and 0 < result.numel() <= largest:
                return function(*args, **{**given, "device": "cpu"})
            return result

    with torch.random.fork_rng(devices=[]), SmallTensorsOnTheCpu(), no_tie_weights():
        torch.default_generator.manual_seed(seed)
        parameters = dict(meta_model(config).named_parameters())
    values = {name: parameters[name].detach() for name in names}
    if lost := [name for name, value in values.items() if value.is_meta or not _is_finite(value)]:
        raise ConfigError(
            f"model config: {causal_lm_class(config).__name__} sets no initial value for "
            f"{', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}. Use another model_type."
        )
    return values


def _is_finite(values: "torch.Tensor") -> bool:
    return bool(values.isfinite().all())


def parameter_shapes(config: "PretrainedConfig") -> dict[str, tuple[int, ...]]:
    """Return {parameter name: shape} in module order; tied weights appear once.

    Raises:
        ConfigError: the model cannot be built.
    """
    return {name: tuple(p.shape) for name, p in meta_model(config).named_parameters()}


def decoder_blocks(model: "nn.Module") -> list["nn.Module"]:
    """Return the decoder blocks, which are the longest list of layers that support transformers'
    gradient checkpointing.
    """
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and all(isinstance(one, GradientCheckpointingLayer) for one in module)
    ]
    return max(lists, key=len, default=[])


def router_loss_coefficient(config: "PretrainedConfig") -> float | None:
    """Return the weight of the routers' auxiliary loss, or None if the model does not compute that
    loss.

    Many config classes have the key `output_router_logits`, but not all of their models read it.
    Every transformers model that reads the key has `load_balancing_loss_func` in its module.
    """
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False) is not True:
        return None
    if not hasattr(sys.modules[causal_lm_class(config).__module__], "load_balancing_loss_func"):
        return None
    for key in ("router_aux_loss_coef", "aux_loss_coef"):  # JetMoE uses the second key
        if hasattr(text, key):
            return float(getattr(text, key) or 0.0)
    return float(text.ffn_config.moe_loss_weight)  # DBRX


def experts_per_token(config: "PretrainedConfig") -> int | None:
    """Return the number of experts per token, or None for a model that returns no router logits."""
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False) is not True:
        return None
    configs = (text, getattr(text, "ffn_config", None))  # DBRX uses the second config
    names = ("num_experts_per_tok", "moe_top_k")
    found = (getattr(each, name, None) for each in configs for name in names)
    return next((count for count in found if isinstance(count, int)), None)


def layer_configs(config: "PretrainedConfig") -> list["PretrainedConfig"]:
    """Return each layer's config; layers have different configs only with `per_layer_config`.

    A heterogeneous config raises an error when a key that differs between layers is read from it.
    """
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # transformers 5.17 has no such configs
        return list(text.per_layer_config)
    return [text] * (getattr(text, "num_hidden_layers", 0) or 0)


@dataclass(frozen=True)
class ConfigKey:
    """A config as a cache key; two keys are equal if the configs' classes and values are equal.

    A round trip through JSON would not restore all values (`inf` in `time_step_limit`).
    """

    config: "PretrainedConfig" = field(compare=False)
    values: str
    config_class: Any

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "ConfigKey":
        kind = config.class_name() if isinstance(config, KnownConfig) else type(config)
        return cls(config, config.to_json_string(), kind)

    def inputs(self, *more: object) -> list[object]:
        """Return what identifies the config, and more, among remembered values."""
        return [self.class_name, self.values, family_digest(self.class_name), *more]

    @property
    def class_name(self) -> str:
        """The name of the config's class, with its module."""
        kind = self.config_class
        return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def num_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the total number of values in all shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def is_routed_expert(name: str) -> bool:
    """Return whether a parameter belongs to routed experts; shared experts process every token."""
    return bool(ROUTED_EXPERT.search(name)) and ".router." not in name


def num_experts(config: "PretrainedConfig") -> tuple[int | None, int | None]:
    """Return the number of routed experts and the number that process a token; None for dense
    models.
    """
    text = config.get_text_config()
    parts = [text, *(getattr(text, name, None) for name in text.sub_configs)]
    return _first_value(parts, EXPERT_COUNT_KEYS), _first_value(parts, EXPERTS_PER_TOKEN_KEYS)


def routed_fraction(config: "PretrainedConfig") -> float:
    """Return the fraction of routed experts that process a token; 1.0 for a dense model."""
    experts, active = num_experts(config)
    return active / experts if experts and active else 1.0


def num_active_parameters(config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of parameters used for one token, excluding the experts that it skips."""
    routed = sum(math.prod(shape) for name, shape in shapes.items() if is_routed_expert(name))
    total = num_parameters(shapes)
    return total - routed + round(routed * routed_fraction(config))


def _first_value(parts: Sequence[Any], keys: tuple[str, ...]) -> int | None:
    """Return the first nonzero value of these keys; if the value is a list by layer, return the
    largest element.
    """
    values = (getattr(part, key, None) for part in parts for key in keys)
    value = next((value for value in values if value), None)
    return max(value) if isinstance(value, list) else value


def block_of(name: str) -> str:
    """Return the name of a parameter's block: its layer in a stack of layers, or its own module.

    `model.layers.3.mlp.up_proj.weight` belongs to "layers.3", `model.embed_tokens.weight` to
    "embed_tokens".
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit() and index:
            return ".".join(parts[index - 1 : index + 1])
    return parts[-2] if len(parts) > 1 else name
