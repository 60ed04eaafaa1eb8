"""Experts that are divided over ranks, as DeepSpeed 0.19.8 knows them: groups, marks, and a flag.

At stages 1 and 2, DeepSpeed reduces a parameter over the ranks of its expert data group, and shards
its optimizer states over them, if the parameter has its two marks, its parameter group says `moe`,
and the engine's `has_moe_layers` is true. The engine sets that attribute only for DeepSpeed's own
layers; everything else goes by parameter. While it saves or loads, the attribute must be false:
otherwise DeepSpeed writes a file for each expert of its own layers.

At stage 3 everything goes by parameter, and the attribute stays false: three more marks, which
DeepSpeed's AutoEP sets too, name the group over which the parameter is partitioned. Its gradient is
divided by the number of all ranks, and its norm is summed over the expert group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerolm.engine import replaced

EXPERTS = "zerolm_experts"  # key in the file with the model's weights


def group_name(degree: int) -> str:
    """Return DeepSpeed's name for the groups of `degree` ranks that together have all experts."""
    return f"ep_size_{degree}"


def create_groups(degree: int, stages: int = 1) -> None:
    """Create the expert groups, neighbouring ranks, and the expert data groups, ranks with the same
    experts. Every rank must call this.

    Args:
        stages: number of pipeline stages; each has consecutive ranks, and experts of its own.
    """
    from deepspeed.utils import groups

    groups._create_expert_and_data_parallel(degree, pp_size=stages)


def expert_group(degree: int) -> Any:
    """Return the process group of this rank's expert group."""
    from deepspeed.utils import groups

    return groups._get_expert_parallel_group(group_name(degree))


def mark(parameter: Any, degree: int) -> None:
    """Mark this rank's slice of a parameter that is divided along its first dimension.

    Args:
        parameter: not partitioned yet.
    """
    parameter.allreduce, parameter.group_name = False, group_name(degree)
    parameter.expert_shape = torch.Size([parameter.shape[0] * degree, *parameter.shape[1:]])
    parameter.expert_degree = degree


def mark_for_partition(parameter: Any) -> None:
    """Mark a divided parameter as one that ZeRO-3 partitions over the ranks that have it."""
    from deepspeed.utils import groups

    parameter.ds_zero_placement_family = "autoep_expert"
    parameter.ds_zero_partition_group_name = parameter.group_name
    parameter.ds_zero_partition_process_group = groups._get_expert_data_parallel_group(
        parameter.group_name
    )


def group_options(parameter: Any) -> dict[str, Any]:
    """Return what DeepSpeed needs in the parameter group of a divided parameter."""
    return {"moe": True, "name": parameter.group_name}


def is_divided(parameter: Any) -> bool:
    """Return whether this rank has only some of the experts in a parameter."""
    return hasattr(parameter, "expert_shape")


def divided_parameters(model: torch.nn.Module) -> dict[str, Any]:
    """Return {name: parameter} for the parameters that are divided over an expert group."""
    return {name: each for name, each in model.named_parameters() if is_divided(each)}


@contextmanager
def recognized(model: torch.nn.Module, zero_stage: int) -> Iterator[None]:
    """Make an engine built in this context treat a model's divided parameters as experts, which
    needs nothing at stage 3, or if there are none, as in a pipeline stage of dense layers.
    """
    if zero_stage == 3 or not divided_parameters(model):
        yield
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    usual = DeepSpeedEngine._configure_distributed_model

    def configure(engine: Any, model: Any) -> None:
        usual(engine, model)
        replaced.install(engine, "has_moe_layers", True)

    with replaced.installed(DeepSpeedEngine, "_configure_distributed_model", configure):
        yield


@contextmanager
def unrecognized(engine: Any) -> Iterator[None]:
    """Make an engine save and load experts like other parameters inside this context."""
    if not engine.has_moe_layers:
        yield
        return
    with replaced.installed(engine, "has_moe_layers", False):
        yield


def divided_groups(engine: Any) -> set[int]:
    """Return the indices of the optimizer's parameter groups whose parameters are divided, at stage
    1 or 2.
    """
    groups = engine.optimizer.param_groups
    return {number for number, group in enumerate(groups) if group.get("moe")}


def description(model: torch.nn.Module) -> dict[str, Any]:
    """Return what a file of weights says about divided experts; {} if there are none."""
    divided = divided_parameters(model)
    if not divided:
        return {}
    each = next(iter(divided.values()))
    return {EXPERTS: {"degree": each.expert_degree, "parameters": list(divided)}}
