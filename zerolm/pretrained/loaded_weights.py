"""`LoadedWeights`: existing weights as initial values, with the interface of `InitialWeights`.

Published names and shapes may differ from the model code's (Mixtral: one matrix per expert).
Transformers converts complete models; this module runs its conversion for a few parameters at a
time. A first conversion of meta tensors detects mismatches from the headers alone. Must not depend
on where the weights come from: reads them by name from `Tensors`.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

from zerolm.common.errors import ConfigError
from zerolm.common.secrets import masked
from zerolm.common.values import Tensor
from zerolm.model.architecture import meta_model
from zerolm.model.initialization import InitialWeights
from zerolm.pretrained.safetensors_files import DTYPES, Tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MAPPED_BYTES = 1 << 26  # release files after reading this many bytes
SHOWN = 5  # names in a message
CHUNK_ROWS = 4096


class LoadedWeights:
    """Initial values of every parameter and persistent buffer, read from existing weights.

    Args:
        config: the run's model config, whose vocabulary may be larger than the source's.
        where: what to call the weights in messages.
        seed: random seed for the additional rows of a larger vocabulary.

    Attributes:
        units: lists of names; the parameters in a list are read together, and independently of all
            other lists. Tied weights appear only once, under the name of the weight that the others
            are tied to.
        extended: names of the parameters that get additional rows.
        dtypes: torch names of the dtypes of the source's parameters.

    Raises:
        ConfigError: weights are missing or unexpected, or have the wrong shape or dtype.
    """

    def __init__(
        self,
        config: "PretrainedConfig",
        source_config: "PretrainedConfig",
        tensors: Tensors,
        where: str,
        seed: int,
    ):
        self._tensors, self._where = tensors, where
        self._model = meta_model(source_config)
        self._mapping = _conversion(self._model) if tensors.converts else []
        self._read_bytes = 0
        state = {
            name: torch.empty(each.shape, device="meta") for name, each in tensors.listed.items()
        }
        ignored = _check(source_config, state, self._mapping, where)
        self._published = self._group(state, ignored)
        self.units = list(self._published)
        used = {
            name: tensors.listed[name]
            for unit, names in self._published.items()
            if any(map(self._is_parameter, unit))
            for name in names
        }
        if problems := _dtype_problems(used, where):
            raise ConfigError(problems)
        self.dtypes = {tensor.dtype for tensor in used.values()}
        self._shapes = {name: tuple(v.shape) for name, v in self._model.state_dict().items()}
        target = {name: tuple(v.shape) for name, v in meta_model(config).state_dict().items()}
        self.extended = sorted(
            name for unit in self.units for name in unit if target[name] != self._shapes[name]
        )
        self._fresh = InitialWeights(config, seed) if self.extended else None

    def scale_new_rows(self, factors: Mapping[str, float]) -> None:
        """Multiply the random values in new rows by the factor for their parameter."""
        if self._fresh is not None:
            self._fresh.factors = factors

    def _group(
        self, state: Mapping[str, torch.Tensor], ignored: set[str]
    ) -> "dict[tuple[str, ...], list[str]]":
        """Return {names of the parameters in a unit: names of the published weights for the
        unit}.
        """
        groups: dict[str, list[str]] = {}
        converted = set()
        expected = self._model.state_dict()
        for name in state:
            target, by_converter = _target(self._model, self._mapping, name, expected)
            groups.setdefault(target, []).append(name)
            if by_converter:
                converted.add(target)
        tied: dict[str, str] = self._model.all_tied_weights_keys
        units: dict[tuple[str, ...], list[str]] = {}
        for target, names in groups.items():
            if target in ignored or (target not in converted and target not in expected):
                continue
            made = {target}
            if target in converted:
                made = set(_convert(self._model, {n: state[n] for n in names}, self._mapping))
            twins = {tied[name] for name in made if name in tied}
            if twins and twins & groups.keys():
                self._require_equal(names, groups[next(iter(twins))])
                continue
            units[tuple(sorted(tied.get(name, name) for name in made))] = names
        return units

    def _require_equal(self, names: list[str], others: list[str]) -> None:
        """Check that tied weights are equal where the files contain more than one of them."""
        for name, other in zip(names, others, strict=True):
            first, second = self._tensors[name], self._tensors[other]
            parts = zip(first.split(CHUNK_ROWS), second.split(CHUNK_ROWS), strict=True)
            equal = first.shape == second.shape and all(torch.equal(*pair) for pair in parts)
            del first, second, parts
            self._tensors.release()
            if not equal:
                raise ConfigError(
                    f"{self._where}: {name} and {other} differ, but the config ties them "
                    f"(tie_word_embeddings). Set it to false in the source's config.json."
                )

    def compute(self, unit: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return {name: values} for `units[unit]` on the CPU, with parameters in `dtype`."""
        names = self.units[unit]
        published = {name: self._tensors[name] for name in self._published[names]}
        values = _convert(self._model, published, self._mapping)
        self._read_bytes += sum(tensor.nbytes for tensor in published.values())
        tied: dict[str, str] = self._model.all_tied_weights_keys
        found = {}
        for name, value in values.items():
            name = tied.get(name, name)
            if name in self.extended:
                value = self._extend(name, value)
            found[name] = value.to(dtype, copy=True) if self._is_parameter(name) else value.clone()
        del published, values
        if self._read_bytes > MAPPED_BYTES:
            self._tensors.release()
            self._read_bytes = 0
        return found

    def _is_parameter(self, name: str) -> bool:
        path, _, leaf = name.rpartition(".")
        return leaf in self._model.get_submodule(path)._parameters

    def _extend(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the values extended by new rows, which are initialized as in a new model."""
        assert self._fresh is not None
        units = self._fresh.units
        number = next(number for number, names in enumerate(units) if name in names)
        extended = self._fresh.compute(number, torch.float32)[name]
        extended[: len(value)] = value
        return extended


def _conversion(model: "PreTrainedModel") -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def _target(
    model: "PreTrainedModel", mapping: list[Any], name: str, expected: dict[str, torch.Tensor]
) -> tuple[str, bool]:
    """Return the name, or first name, of a published weight in the state dict `expected`.

    Also returns whether the weight's values must be converted.

    Source: `convert_and_load_state_dict_in_model` in transformers.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    prefix = model.base_model_prefix
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
    if target not in expected and name in expected:
        target, pattern = rename_source_key(name, [], [], prefix, expected)
    return target, pattern is not None


def _dtype_problems(listed: Mapping[str, Tensor], where: str) -> list[str]:
    allowed = set(DTYPES.values())
    other: dict[str, list[str]] = {}
    for name, tensor in listed.items():
        if tensor.dtype not in allowed:
            other.setdefault(tensor.dtype, []).append(name)
    return [
        f"{where}: {_shown(names)}: {dtype}: only {', '.join(sorted(allowed))} can be trained. "
        f"Give the unquantised weights."
        for dtype, names in other.items()
    ]


def _check(
    config: "PretrainedConfig", state: dict[str, torch.Tensor], mapping: list[Any], where: str
) -> set[str]:
    """Check the conversion on meta tensors; return the published names that transformers
    ignores.
    """
    model = meta_model(config)
    info = _run_conversion(model, state, mapping)
    unexpected = set(info.unexpected_keys)
    model._adjust_missing_and_unexpected_keys(info)
    tied: dict[str, str] = model.all_tied_weights_keys
    missing = set(info.missing_keys)
    for name, source in tied.items():
        if not {name, source} <= missing:
            missing -= {name, source}
    problems = [
        f"{where}: {name}: has shape {tuple(found)}, but its config implies {tuple(expected)}. The "
        f"config.json does not belong to these weights."
        for name, found, expected in sorted(info.mismatched_keys)[:SHOWN]
    ]
    problems += [
        f"{where}: {name}: cannot be converted ({' '.join(masked(text).split())[-200:]})."
        for name, text in sorted(info.conversion_errors.items())[:SHOWN]
    ]
    wrong = {name for name, *_ in info.mismatched_keys} | set(info.conversion_errors)
    if missing := missing - wrong:
        problems.append(
            f"{where}: {_shown(missing)}: missing, but {type(model).__name__} has them. Give a "
            f"complete model with its own config.json."
        )
    if info.unexpected_keys:
        problems.append(
            f"{where}: {_shown(info.unexpected_keys)}: {type(model).__name__} has no such weights. "
            f"Give a causal language model with its own config.json."
        )
    if problems:
        raise ConfigError(problems)
    return unexpected


def _shown(names: Any) -> str:
    names = sorted(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _convert(
    model: "PreTrainedModel", published: dict[str, torch.Tensor], mapping: list[Any]
) -> dict[str, torch.Tensor]:
    """Convert published weights; return {name in the model: values} with parameters in float32.

    The model does not change.
    """
    before = _tensors_of(model)
    try:
        info = _run_conversion(model, published, mapping)
        assert not info.conversion_errors, info.conversion_errors
        after = _tensors_of(model)
        return {
            name: slots[leaf].detach()
            for name, (slots, leaf, value) in after.items()
            if value is not before[name][2]
        }
    finally:
        for slots, leaf, value in before.values():
            slots[leaf] = value


def _tensors_of(model: nn.Module) -> "dict[str, tuple[dict[str, Any], str, Any]]":
    """Return each parameter and buffer as {name: (its module's dictionary, its key there,
    value)}.
    """
    found = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for slots in (module._parameters, module._buffers):
            for leaf, value in slots.items():
                if value is not None:
                    found[prefix + leaf] = (slots, leaf, value)
    return found


def _run_conversion(
    model: "PreTrainedModel", state: dict[str, torch.Tensor], mapping: list[Any]
) -> Any:
    """Load weights into a model on the meta device; return how they differ from the model's
    weights.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    on_meta = any(tensor.is_meta for tensor in state.values())
    load = LoadStateDictConfig(
        dtype=torch.float32, weight_mapping=mapping, device_map={"": "meta" if on_meta else "cpu"}
    )
    with _quiet():
        # None is tp_plan in early transformers 5 releases, and disk_offload_index in later ones.
        info, _ = convert_and_load_state_dict_in_model(model, state, load, None)
    return info


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turn off progress bars, and the loading threads of transformers, which use more memory."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
