"""Routers that choose experts by score plus a bias, which balances expert loads without a loss.

Finds the biases in a model, and counts the tokens of each expert. DeepSeek-V3 named the bias
`e_score_correction_bias`; most families store it as a buffer, some as a frozen parameter. In
transformers 5.17 to 5.23 all these families pass (hidden states, indices of the chosen experts,
...) to a module `experts` in the block that contains the bias. Must not decide when a bias changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerolm.engine.parameters import gathered, num_values
from zerolm.model.architecture import ConfigKey, meta_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BIASES = ("e_score_correction_bias", "expert_bias")  # AFMoE and LFM2-MoE use the second name


@dataclass(frozen=True)
class BiasedRouter:
    """A router that adds a bias to its scores to choose experts.

    Attributes:
        name: the bias's full name in the model.
        owner, leaf: the module that contains the bias, and the bias's name in this module.
        experts: the module that is called with the indices of the chosen experts.
    """

    name: str
    owner: nn.Module
    leaf: str
    experts: nn.Module

    @property
    def bias(self) -> torch.Tensor:
        """The current bias: one value per expert, in a tensor of any shape."""
        bias: torch.Tensor = getattr(self.owner, self.leaf)
        return bias


def biased_routers(model: nn.Module) -> list[BiasedRouter]:
    """Return the routers with a bias that is not trained, in model order."""
    modules = dict(model.named_modules())
    found = []
    for path, owner in modules.items():
        for leaf in BIASES:
            bias = getattr(owner, leaf, None)
            if not isinstance(bias, torch.Tensor) or bias.requires_grad:
                continue
            block = path
            while block and not hasattr(modules[block], "experts"):
                block = block.rpartition(".")[0]
            experts = getattr(modules[block], "experts", None)
            if isinstance(experts, nn.Module):
                found.append(BiasedRouter(f"{path}.{leaf}", owner, leaf, experts))
    return found


def unsupported_reason(config: "PretrainedConfig") -> str | None:
    """Return why a model's experts cannot be balanced by a bias, or None if they can."""
    return _unsupported_reason(ConfigKey.of(config))


@lru_cache(maxsize=16)
def _unsupported_reason(key: ConfigKey) -> str | None:
    name = key.config.model_type
    if getattr(key.config.get_text_config(), "zero_expert_num", 0):
        return (
            f"{name} has experts without weights (zero_expert_num), whose share of the tokens is a "
            "separate choice"
        )
    if not biased_routers(meta_model(key.config)):
        return f"{name} has no router with a bias for balancing ({', '.join(BIASES)})"
    return None


def move_biases_to_buffers(model: nn.Module) -> None:
    """Turn frozen biases into float32 buffers. Every rank must call this before
    `deepspeed.initialize`.

    As parameters they would be cast to the training precision, sharded by ZeRO-3, and saved in a
    form that cannot be resharded. Their names in the state dict do not change.
    """
    for router in biased_routers(model):
        parameter = router.owner._parameters.get(router.leaf)
        if parameter is None:
            continue
        with gathered([parameter]):
            value = parameter.detach().float().clone()
        del router.owner._parameters[router.leaf]
        router.owner.register_buffer(router.leaf, value)


class ExpertLoads:
    """Counts how often each expert is chosen on one rank. Does not support compiled models.

    Forward passes recomputed by gradient checkpointing run outside `counting`, and are not counted.
    """

    def __init__(self, routers: list[BiasedRouter]):
        self._counts: list[torch.Tensor] = []
        self._counting = False
        for number, router in enumerate(routers):
            bias = router.bias
            num_experts = num_values(bias)
            self._counts.append(torch.zeros(num_experts, dtype=torch.int64, device=bias.device))
            router.experts.register_forward_pre_hook(partial(self._count, number))

    @property
    def num_experts(self) -> list[int]:
        """Number of experts in each router."""
        return [len(counts) for counts in self._counts]

    def reset(self) -> None:
        """Set all counts to zero."""
        for counts in self._counts:
            counts.zero_()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the experts chosen in forward passes within this context."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def counts(self) -> torch.Tensor:
        """Return the counts of all routers, concatenated into one int64 tensor."""
        return torch.cat(self._counts)

    def _count(self, number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._counting:
            chosen, counts = args[1], self._counts[number]
            # Compares and sums, because `bincount` is not deterministic on a GPU.
            experts = torch.arange(len(counts), device=chosen.device)
            counts += (chosen.flatten()[:, None] == experts).sum(0)


@torch.no_grad()
def update_biases(routers: list[BiasedRouter], loads: list[list[int]], rate: float) -> None:
    """Raise the bias by `rate` for experts below the mean load, and lower it for experts above.

    Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); Wang et al. 2024 (arXiv 2408.15664,
        algorithm 1).
    """
    for router, load in zip(routers, loads, strict=True):
        total, bias = sum(load), router.bias
        signs = [(total > each * len(load)) - (total < each * len(load)) for each in load]
        change = torch.tensor(signs, dtype=torch.float32).to(bias.device).mul_(rate)
        bias += change.view_as(bias)
