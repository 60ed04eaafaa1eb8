"""Chooses the layers of a model that multiply in fp8, and converts them in place.

Must not depend on ZeRO or settings.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerolm.engine import replaced
from zerolm.fp8.linear import MULTIPLE, Fp8Linear
from zerolm.model.architecture import (
    ConfigKey,
    is_routed_expert,
    meta_model,
    num_experts,
)
from zerolm.model.flops import TRAINING_TO_FORWARD
from zerolm.model.stages import own_blocks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROUTER = re.compile(r"(^|\.)(\w*_)?(gate|router|gating)(\.|$)")  # but not gate_proj
OLDEST_GPU = (8, 9)  # compute capability


@dataclass(frozen=True)
class Fp8Layers:
    """The linear layers in a model's blocks, by name.

    Attributes:
        chosen: the layers to run in fp8.
        odd: layers with a size that is not a multiple of 16.
    """

    chosen: dict[str, nn.Linear]
    odd: dict[str, nn.Linear]

    @property
    def flops_per_token(self) -> float:
        """The FLOPs of fp8 products per training token."""
        sizes = (layer.in_features * layer.out_features for layer in self.chosen.values())
        return TRAINING_TO_FORWARD * 2 * sum(sizes)


def find_layers(model: Any) -> Fp8Layers:
    """Return the linear layers in the decoder blocks, except routers and routed experts.

    Experts either multiply by stacked matrices, which are not linear layers, or receive a varying
    number of tokens.
    """
    inside = {layer for block in own_blocks(model) for layer in block.modules()}
    experts, _ = num_experts(model.config)
    found = Fp8Layers({}, {})
    for name, layer in model.named_modules():
        if type(layer) is not nn.Linear or layer not in inside or is_routed_expert(name):
            continue
        if ROUTER.search(name) or layer.out_features == experts:
            continue
        odd = layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
        (found.odd if odd else found.chosen)[name] = layer
    return found


def layers_of(config: "PretrainedConfig") -> Fp8Layers:
    """Return the linear layers of a model without allocating the model."""
    return _layers_of(ConfigKey.of(config))


@lru_cache(maxsize=16)
def _layers_of(key: ConfigKey) -> Fp8Layers:
    return find_layers(meta_model(key.config))


def unsupported_device(kind: str) -> str | None:
    """Return why a type of device (as in `Device`) cannot multiply in fp8, or None if it can."""
    if kind in ("cpu", "absent"):
        return None
    if kind != "cuda" or torch.version.hip:
        return "only NVIDIA GPUs and, slowly, CPUs support its number formats"
    capability = torch.cuda.get_device_capability()
    if capability >= OLDEST_GPU:
        return None
    found, needed = (".".join(map(str, each)) for each in (capability, OLDEST_GPU))
    return f"this GPU has compute capability {found} and fp8 needs {needed}"


def install(model: Any) -> None:
    """Convert a model's layers in place; call before `deepspeed.initialize`."""
    for layer in find_layers(model).chosen.values():
        replaced.install(layer, "__class__", Fp8Linear)  # keeps parameters, hooks and name
