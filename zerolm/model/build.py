"""Builds the model: constructs it for any ZeRO stage and initialises its weights.

`build_model` produces bit-identical weights for every stage, world size and device.
`weights_fingerprint` makes the weights of two runs comparable, and `check_initialization` detects
weights that do not match the config. Must not depend on data, schedules or the optimizer.
"""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist

from zerolm.config.settings import Recompute
from zerolm.engine.parameters import (
    cast,
    divided_over,
    gathered,
    is_partitioned,
    partitioned_while_built,
    zero_padding,
)
from zerolm.engine.stages import StageGroups
from zerolm.engine.zero3_hooks import fit_zero3_to_recomputation, follow_external_parameters
from zerolm.model import experts, stages
from zerolm.model.activation_checkpointing import checkpoint_kwargs
from zerolm.model.architecture import ConfigKey, meta_model, train_every_row
from zerolm.model.init_check import InitializationReport, check_initialization
from zerolm.model.initialization import InitialWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "InitializationReport",
    "build_model",
    "check_initialization",
    "float32_buffers",
    "restore_float32_buffers",
    "weights_fingerprint",
]

FINGERPRINT_CHUNK = 1 << 21  # number of values; limits each int64 copy to 16 MiB
ODD_MULTIPLIER = -7046029254386353131  # 2**64 / golden ratio as int64; spreads the positions


def build_model(
    config: "PretrainedConfig",
    *,
    seed: int,
    dtype: torch.dtype,
    zero3_config: dict[str, Any] | None,
    attn_implementation: str,
    gradient_checkpointing: Recompute,
    device: torch.device | str,
    initial: "InitialValues | None" = None,
    factors: Mapping[str, float] = MappingProxyType({}),
    alone: bool = False,
    expert_degree: int = 1,
    stage_groups: StageGroups | None = None,
    stage_layers: Sequence[int] = (),
) -> "PreTrainedModel":
    """Build and initialise a causal LM for training. Every rank must call this, unless `alone`.

    Args:
        config: not modified; the model gets a copy with `use_cache` off.
        seed: determines every initial value (docs/initialization.md).
        dtype: dtype of parameters; float32 buffers (rotary tables) stay float32.
        zero3_config: the resolved DeepSpeed JSON at stage 3, at which `deepspeed.zero.Init`
            partitions the parameters during construction, on the accelerator or as set by
            `offload_param`. None at other stages, where the model is on `device`.
        attn_implementation: transformers' name of the kernel, from `zerolm.attention.choice`.
        initial: existing values for all parameters and persistent buffers, used instead of random
            values.
        factors: {parameter name: factor for its random values}.
        alone: whether this rank computes all values itself; not supported with `zero3_config`.
        expert_degree: number of neighbouring ranks over which experts are divided; their groups
            must exist.
        stage_groups: if the model is divided into pipeline stages, the groups of this rank's stage;
            memory is allocated and values are computed only for what this stage has.
        stage_layers: number of blocks of each stage.
    """
    weights = initial or InitialWeights(config, seed, factors)
    if stage_groups is not None:
        with stages.parameters_on_meta():
            model = construct(config, dtype, attn_implementation)
        returned = stages.passed(config).values
        stages.cut(model, stage_groups.stage, stage_layers, returned)
        _cast_parameters(model, dtype)
    else:
        with partitioned_while_built(zero3_config):
            model = construct(config, dtype, attn_implementation)
    if expert_degree > 1:
        experts.divide(model, expert_degree)
    if stage_groups is not None:
        stages.allocate(model, device)
    if zero3_config is None:
        torch.nn.Module.to(model, device)
    else:
        _move_buffers(model, torch.device(device))
    _cast_parameters(model, dtype)
    _fill(model, weights, dtype, alone, stage_groups)
    zero_padding(model)
    model.config.use_cache = False
    if getattr(model.config, "rescale_every", 0):
        # In evaluation mode, RWKV would halve weights in place before each forward pass to avoid
        # fp16 overflow; under ZeRO-3 it would change temporary copies, and the next step would
        # crash.
        model.config.rescale_every = 0
    if gradient_checkpointing:
        # transformers renamed this method between 5.17 and 5.23.
        old_method = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", old_method)
        enable(checkpoint_kwargs(gradient_checkpointing))
    if zero3_config is not None:
        follow_external_parameters()
        if gradient_checkpointing:
            fit_zero3_to_recomputation()
    return model.train()


def construct(
    config: "PretrainedConfig", dtype: torch.dtype, attn_implementation: str
) -> "PreTrainedModel":
    """Construct a model, whose parameters are still to be initialized."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():  # `_fill` initialises the weights
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=False,
        )
    model.tie_weights()
    train_every_row(model)
    return model


def _cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters that some classes keep in float32 (routers, state-space decay), like ZeRO-1
    and 2.

    ZeRO-3 refuses a model whose parameters have several dtypes. Their values are not set yet.
    """
    for parameter in model.parameters():
        if parameter.dtype != dtype:
            cast(parameter, dtype)


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


class InitialValues(Protocol):
    """A source of initial parameter values: `InitialWeights`, or existing weights."""

    units: list[Any]

    def compute_all(
        self, units: Sequence[int], dtype: torch.dtype
    ) -> Iterator[dict[str, torch.Tensor]]: ...


def _fill(
    model: torch.nn.Module,
    weights: InitialValues,
    dtype: torch.dtype,
    alone: bool,
    stage_groups: StageGroups | None = None,
) -> None:
    """Copy the initial values into the parameters; every rank computes some of the units.

    The ranks of a pipeline stage compute its units.
    """
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    parameters |= dict(model.named_buffers())
    ranks: Sequence[int] = [0]
    if stage_groups is not None:
        ranks = stage_groups.copies
    elif dist.is_initialized() and not alone:
        ranks = range(dist.get_world_size())
    group = None if stage_groups is None else stage_groups.data
    index = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
    units = [
        number
        for number, names in enumerate(weights.units)
        if stage_groups is None or not parameters.keys().isdisjoint(names)
    ]
    computed = weights.compute_all(units[index :: len(ranks)], dtype)
    for start in range(0, len(units), len(ranks)):
        wave = [weights.units[unit] for unit in units[start : start + len(ranks)]]
        values = next(computed, {})
        for writer, names in enumerate(wave):
            own = names if stage_groups is None else [each for each in names if each in parameters]
            targets = [parameters[name] for name in own]
            with gathered(targets, ranks[writer], group), torch.no_grad():
                if index == writer:
                    for name, target in zip(own, targets, strict=True):
                        target.copy_(values[name])
                if len(ranks) > 1:  # `gathered` broadcasts what it has gathered on exit
                    for target in targets:
                        if not is_partitioned(target) and divided_over(target) != "experts":
                            dist.broadcast(target.data, src=ranks[writer], group=group)


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Return a hex SHA-256 of all parameters. Every rank must call this.

    The hash does not depend on the ZeRO stage, the world size, the pipeline stages or the device.
    The bit patterns of each parameter are summed with position-dependent factors, in wrapping
    64-bit arithmetic on its device; because the factors are odd, any change of a single value
    changes the sum.
    """
    lines = {}
    for name, parameter in model.named_parameters():
        with gathered([parameter]):
            total = weighted_bit_sum(parameter.detach())
            lines[name] = f"{name} {tuple(parameter.shape)} {parameter.dtype} {total}\n"
    names = list(lines)
    if stages.stage_of(model) is not None:
        lines = stages.of_all_stages(model, lines)
        config: Any = model.config
        names = [name for name, _ in meta_model(ConfigKey.of(config).config).named_parameters()]
    digest = hashlib.sha256()
    for name in names:
        digest.update(lines[name].encode())
    return digest.hexdigest()


def weighted_bit_sum(values: torch.Tensor) -> int:
    """Return a sum of bit patterns that changes if any single value changes."""
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.contiguous().view(-1).view(as_integers[values.element_size()])
    places = torch.arange(min(len(bits), FINGERPRINT_CHUNK), device=bits.device)
    weights = places * ODD_MULTIPLIER | 1
    total = 0
    for number, chunk in enumerate(bits.split(FINGERPRINT_CHUNK)):
        total += (2 * number + 1) * int((chunk * weights[: len(chunk)]).sum())
    return total % (1 << 64)


def float32_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: copy on the CPU} for the float32 buffers, which are mostly rotary tables."""
    return {
        name: buffer.cpu().clone()
        for name, buffer in _float_buffers(model)
        if buffer.dtype == torch.float32
    }


def restore_float32_buffers(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Restore buffers that `data_types.buffer_dtype` in the DeepSpeed JSON has cast.

    Without that key, DeepSpeed 0.19.8 does not cast buffers. Call after `deepspeed.initialize`.
    """
    for name, buffer in _float_buffers(model):
        if name in saved:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = saved[name].to(buffer.device, copy=True)


def _float_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, b) for name, b in model.named_buffers() if b.is_floating_point())
