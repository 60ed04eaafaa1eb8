"""`InitialWeights`: initial weights as a function of (config, seed), bit-identical everywhere.

Each module's `_init_weights` runs in float32 on the CPU with its own seed, derived from the run's
seed and the module's name. So the values do not depend on the ZeRO stage, the number of ranks or
the device, and are cast to the dtype only at the end. docs/initialization.md shows the algorithm
in ten lines of PyTorch. Must not depend on DeepSpeed: `build_model` copies the values into the
model.
"""

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerolm.common.errors import ConfigError, reason
from zerolm.common.machine import cores_of_rank
from zerolm.model.architecture import constructor_values, meta_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Limit on the bytes of float32 values that a rank's threads compute in advance; at least one unit
# is computed.
MAX_AHEAD_BYTES = 2 << 30
_global_generator = threading.Lock()


def module_seed(seed: int, module_name: str) -> int:
    """Return the seed of a module's initial values; torch's CPU generator uses only 32 bits."""
    digest = hashlib.sha256(f"{seed}/{module_name}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


class InitialWeights:
    """The initial values of every parameter of `AutoModelForCausalLM.from_config(config)`.

    Args:
        factors: {parameter name: factor for the drawn values}.

    Attributes:
        units: lists of the names of parameters that are computed together. A unit's parameters are
            computed together, because one module writes several of them, or several modules write
            the same one (GPT-2's attention rewrites its projection's weight). Units are independent
            of each other. A tied weight appears only under its source's name.

    Raises:
        ConfigError: the class sets no initial value for a parameter, or its initialisation fails.
    """

    def __init__(
        self,
        config: "PretrainedConfig",
        seed: int,
        factors: Mapping[str, float] = MappingProxyType({}),
    ):
        from transformers.initialization import no_tie_weights

        self.seed, self.factors = seed, factors
        # Weights are untied, as in transformers' initialisation, so the source's values are used.
        with no_tie_weights():
            model = meta_model(config)
        self._modules = dict(model.named_modules())
        self._initializers = _initializers(model)
        try:
            self._writes = _find_writes(model, self._initializers)
        # any exception type: transformers' classes do not validate all values
        except Exception as error:
            raise ConfigError(
                f"model config: the weights of a {config.model_type!r} model cannot be initialized "
                f"from these values ({reason(error)}). Correct the config.json."
            ) from error
        written = set().union(*self._writes.values())
        unwritten = [name for name, _ in model.named_parameters() if name not in written]
        # Constants, such as the slopes in Apertus' activation, and the projections of GPT-1.
        self._constructed = constructor_values(config, unwritten, module_seed(seed, ""))
        targets = set(model.all_tied_weights_keys)
        groups = _connected(self._writes)
        self._unit_modules = [group for group in groups if self._written_by(group) - targets]
        self.units = [sorted(self._written_by(group) - targets) for group in self._unit_modules]
        if constructed := [name for name in unwritten if name not in targets]:
            self._unit_modules.append([])
            self.units.append(constructed)

    def _written_by(self, modules: list[str]) -> set[str]:
        return set().union(*(self._writes[name] for name in modules))

    def compute(self, unit: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return {name: values} of `units[unit]` on the CPU, drawn in float32, then cast.

        Does not change the state of torch's global generator, so threads may compute units
        concurrently.
        """
        modules = self._unit_modules[unit]
        if not modules:
            return {name: self._constructed[name].to(dtype) for name in self.units[unit]}
        slots = {}
        for name in self._written_by(
            modules
        ):  # including tied targets, which consume random numbers
            path, _, leaf = name.rpartition(".")
            parameters = self._modules[path]._parameters
            placeholder = parameters[leaf]
            assert placeholder is not None
            slots[name] = (parameters, leaf, placeholder)
            # NaN, so `check_initialization` detects values that are never written.
            empty = torch.full(placeholder.shape, float("nan"), dtype=torch.float32, device="cpu")
            parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        try:
            with torch.no_grad(), _OwnGenerator() as own:
                for name in modules:
                    own.generator.manual_seed(module_seed(self.seed, name))
                    self._initializers[name](self._modules[name])
            values = {name: parameters[leaf] for name, (parameters, leaf, _) in slots.items()}
            return {
                name: values[name].detach().mul_(self.factors.get(name, 1.0)).to(dtype)
                for name in self.units[unit]
            }
        finally:
            for parameters, leaf, placeholder in slots.values():
                parameters[leaf] = placeholder

    def compute_all(
        self, units: Sequence[int], dtype: torch.dtype, threads: int | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the result of `compute` for each unit, in order; threads compute results in
        advance.

        torch draws values sequentially, but without holding Python's global lock. Units computed
        in advance are limited to `MAX_AHEAD_BYTES`. By default, there is one thread for each core
        in this rank's share of the host.
        """
        threads = threads or cores_of_rank(os.environ)
        if threads == 1:
            yield from (self.compute(unit, dtype) for unit in units)
            return
        ahead: deque[tuple[int, Future[dict[str, torch.Tensor]]]] = deque()
        with ThreadPoolExecutor(threads, "initial-weights") as pool:
            for unit in units:
                size = self._float32_bytes(unit)
                while ahead and sum(each for each, _ in ahead) + size > MAX_AHEAD_BYTES:
                    yield ahead.popleft()[1].result()
                ahead.append((size, pool.submit(self.compute, unit, dtype)))
            while ahead:
                yield ahead.popleft()[1].result()

    def _float32_bytes(self, unit: int) -> int:
        modules = (name.rpartition(".") for name in self.units[unit])
        return 4 * sum(self._modules[path]._parameters[leaf].numel() for path, _, leaf in modules)


class _OwnGenerator(TorchDispatchMode):
    """Makes this thread's random operations draw from `generator` instead of torch's global
    generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return operation(*args, **given)
        if any(argument.name == "generator" for argument in operation._schema.arguments):
            return operation(*args, **({"generator": self.generator} | given))
        with _global_generator, torch.random.fork_rng(devices=[]):  # rand_like and similar
            torch.default_generator.set_state(self.generator.get_state())
            found = operation(*args, **given)
            self.generator.set_state(torch.default_generator.get_state())
        return found


def _initializers(model: "PreTrainedModel") -> dict[str, Callable[[nn.Module], None]]:
    """Return {module name: `_init_weights` of the innermost model that contains the module}.

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
    """Return {module: parameters that its initialisation writes}, with children before parents.

    Runs on the meta device, where writes are free.
    """
    writes = {}
    with torch.no_grad(), _init_functions_that_write():
        for name, module in reversed(list(model.named_modules())):
            prefix = f"{name}." if name else ""
            below = {_storage(p): prefix + key for key, p in module.named_parameters()}
            with _WrittenStorages() as storages:
                initializers[name](module)
            now = {_storage(p) for p in module.parameters()}
            # A parameter whose data was replaced has a different storage.
            written = [key for at, key in below.items() if at in storages.found or at not in now]
            if written:
                writes[name] = written
    return writes


class _WrittenStorages(TorchDispatchMode):
    """Collects the storages to which operations write, also through views and `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        for position, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else given.get(argument.name)
                tensors = value if isinstance(value, list | tuple) else [value]
                self.found.update(_storage(t) for t in tensors if isinstance(t, torch.Tensor))
        return operation(*args, **given)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _init_functions_that_write() -> Iterator[None]:
    """Make the functions in `torch.nn.init` write to meta tensors, because `trunc_normal_` would
    not.
    """
    from transformers import initialization

    def zero(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.zero_()

    functions = initialization.TORCH_INIT_FUNCTIONS
    zeros = dict.fromkeys(functions, zero)
    with mock.patch.dict(functions, zeros), mock.patch.dict(vars(torch.nn.init), zeros):
        yield


def _connected(writes: dict[str, list[str]]) -> list[list[str]]:
    """Group the modules that write a common parameter; each group is in the order of `writes`."""
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
