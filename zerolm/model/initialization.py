"""Initial weights as a function of (config, seed): the same bits whatever trains them.

Each module's `_init_weights` runs in float32 on the CPU under a seed of its own, made of the run's
seed and the module's name, on a copy of the model that has shapes only. So the values depend
neither on ZeRO's stage, nor on the number of ranks, nor on the device or the dtype (the cast is
last). docs/initialization.md states the recipe in ten lines of plain PyTorch. It must not know
about DeepSpeed: `zerolm.model` copies the values to where they are trained.
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerolm.common.errors import ConfigError
from zerolm.model.architecture import meta_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def module_seed(seed: int, module_name: str) -> int:
    """Return the seed of one module's initial values, in [0, 2**32).

    32 bits, because torch's CPU generator uses no more of a seed than that.
    """
    digest = hashlib.sha256(f"{seed}/{module_name}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


class InitialWeights:
    """The initial values of every parameter of `AutoModelForCausalLM.from_config(config)`.

    Attributes:
        units: lists of parameter names. The parameters of a unit are computed together, because
            one module writes several of them, or several modules write one (GPT-2's attention
            writes its projection's weight once more); units are independent of one another.
            A tied weight stands under the name of its source only.

    Raises:
        ConfigError: the class leaves a parameter without an initial value.
    """

    def __init__(self, config: "PretrainedConfig", seed: int):
        from transformers.initialization import no_tie_weights

        self.seed = seed
        # Untied, as transformers initialises: the source's own draws win, never the target's.
        with no_tie_weights():
            model = meta_model(config)
        self._modules = dict(model.named_modules())
        self._initializers = _initializers(model)
        self._writes = _find_writes(model, self._initializers)
        names = [name for name, _ in model.named_parameters()]
        written = set().union(*self._writes.values())
        if unwritten := [name for name in names if name not in written]:
            raise ConfigError(
                f"model config: {type(model).__name__} says no initial value for "
                f"{', '.join(unwritten[:3])}{', ...' if len(unwritten) > 3 else ''} "
                f"(its _init_weights leaves them alone). Use another model_type."
            )
        targets = set(model.all_tied_weights_keys)
        groups = _connected(self._writes)
        self._unit_modules = [group for group in groups if self._written_by(group) - targets]
        self.units = [sorted(self._written_by(group) - targets) for group in self._unit_modules]

    def _written_by(self, modules: list[str]) -> set[str]:
        return set().union(*(self._writes[name] for name in modules))

    def compute(self, unit: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the values of `units[unit]` by name, on the CPU, drawn in float32 and cast last.

        torch's global generator is as before afterwards.
        """
        modules = self._unit_modules[unit]
        slots = {}
        for name in self._written_by(modules):  # tied targets too: they take their share of draws
            path, _, leaf = name.rpartition(".")
            parameters = self._modules[path]._parameters
            placeholder = parameters[leaf]
            assert placeholder is not None
            slots[name] = (parameters, leaf, placeholder)
            # NaN, so that the self-check finds an element that nothing writes.
            empty = torch.full(placeholder.shape, float("nan"), dtype=torch.float32, device="cpu")
            parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for name in modules:
                    torch.default_generator.manual_seed(module_seed(self.seed, name))
                    self._initializers[name](self._modules[name])
            values = {name: parameters[leaf] for name, (parameters, leaf, _) in slots.items()}
            return {name: values[name].detach().to(dtype) for name in self.units[unit]}
        finally:
            for parameters, leaf, placeholder in slots.values():
                parameters[leaf] = placeholder


def _initializers(model: "PreTrainedModel") -> dict[str, Callable[[nn.Module], None]]:
    """Return the `_init_weights` that is in charge of each module: the nearest model's around it.

    Source: `PreTrainedModel.initialize_weights` of transformers.
    """
    from transformers import PreTrainedModel

    chosen: dict[str, Callable[[nn.Module], None]] = {}
    for name, module in model.named_modules():  # parents first
        if isinstance(module, PreTrainedModel):
            chosen[name] = module._init_weights
        else:
            chosen[name] = chosen[name.rpartition(".")[0]]
    return chosen


def _find_writes(
    model: "PreTrainedModel", initializers: dict[str, Callable[[nn.Module], None]]
) -> dict[str, list[str]]:
    """Return the parameters that each module's `_init_weights` writes, children before parents.

    A tensor counts the writes to it, on the meta device too, where a write costs nothing.
    """
    writes = {}
    with torch.no_grad():
        for name, module in reversed(list(model.named_modules())):
            prefix = f"{name}." if name else ""
            below = [(prefix + key, p, p._version) for key, p in module.named_parameters()]
            initializers[name](module)
            written = [key for key, p, version in below if p._version != version]
            if written:
                writes[name] = written
    return writes


def _connected(writes: dict[str, list[str]]) -> list[list[str]]:
    """Group the modules that share a parameter, in the order of `writes` within each group."""
    group_of: dict[str, list[str]] = {}  # by parameter
    for module, names in writes.items():
        merged = [module]
        for group in {
            id(group_of[name]): group_of[name] for name in names if name in group_of
        }.values():
            merged = group + merged
        covered = set().union(*(writes[member] for member in merged))
        group_of.update(dict.fromkeys(covered, merged))
    order = {module: position for position, module in enumerate(writes)}
    groups = {id(group): sorted(group, key=order.__getitem__) for group in group_of.values()}
    return sorted(groups.values(), key=lambda group: -order[group[0]])
