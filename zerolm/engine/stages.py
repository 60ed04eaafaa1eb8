"""Pipeline stages, as DeepSpeed 0.19.8 knows them: process groups, marks, and a tied matrix.

Each stage has an engine of its own around its part of the model. DeepSpeed learns from the `mpu`
argument of `deepspeed.initialize` which ranks share a stage, over which it reduces gradients and
shards states, and which stages form a replica, over which it sums the gradient norm. Files of a
checkpoint are named by stage. If the first and the last stage share a matrix, each has a copy; the
copy is marked, so that it counts once, and both get the sum of their gradients.
"""

from typing import Any

import torch
from torch import distributed

STAGE = "zerolm_stage"  # key in the file with a stage's weights


class StageGroups:
    """DeepSpeed's `mpu`: the process groups of this rank's stage and replica.

    Stages are consecutive: rank r is replica r % replicas of stage r // replicas. Every rank must
    create one.

    Args:
        transfers: description of the process groups for sending and receiving.

    Attributes:
        stage: this rank's stage, of `stages`.
        replica: index of this rank's replica, of `replicas`.
        peers: this replica's ranks, by stage.
        copies: ranks with the same stage, by replica.
        pipe, data: process groups of `peers` and `copies`.
        transfers: another process group of `peers`, for sending and receiving: stages take part in
            different numbers of transfers, so these must not be counted with collectives.
        ends: process group of the first and last stage of the replica; None on other ranks.
    """

    def __init__(self, stages: int, transfers: str):
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        self.stages, self.replicas = stages, world_size // stages
        self.stage, self.replica = divmod(rank, self.replicas)
        self.peers = list(range(self.replica, world_size, self.replicas))
        self.copies = list(range(rank - self.replica, rank - self.replica + self.replicas))
        of_replicas = [
            list(range(each, world_size, self.replicas)) for each in range(self.replicas)
        ]
        of_stages = [
            list(range(each * self.replicas, (each + 1) * self.replicas)) for each in range(stages)
        ]
        self.pipe = _own_group(of_replicas)
        self.transfers = _own_group(of_replicas, transfers)
        self.data = _own_group(of_stages)
        self.ends = _own_group([[ranks[0], ranks[-1]] for ranks in of_replicas])

    # ---- Names that DeepSpeed calls

    def get_model_parallel_rank(self) -> int:
        return self.stage

    def get_model_parallel_world_size(self) -> int:
        return self.stages

    def get_model_parallel_group(self) -> Any:
        return self.pipe

    def get_tensor_model_parallel_rank(self) -> int:
        return 0  # the gradients of every stage count in the norm

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return self.replica

    def get_data_parallel_world_size(self) -> int:
        return self.replicas

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.copies

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.stages

    def get_pipeline_model_parallel_group(self) -> Any:
        return self.pipe


def _own_group(groups: list[list[int]], description: str | None = None) -> Any:
    """Create all process groups; return the one with this rank, or None. Every rank must call
    this.
    """
    own, rank = None, distributed.get_rank()
    for ranks in groups:
        group = distributed.new_group(ranks, group_desc=description)
        own = group if rank in ranks else own
    return own


def groups_of(optimizer: Any) -> StageGroups | None:
    """Return the groups of an optimizer's stage; None if the model is not divided into stages."""
    mpu = getattr(optimizer, "mpu", None)
    return mpu if isinstance(mpu, StageGroups) else None


def num_replicas(optimizer: Any) -> int:
    """Return the number of ranks with the same stage: all, if there are no stages."""
    groups = groups_of(optimizer)
    return distributed.get_world_size() if groups is None else groups.replicas


def mark_copy(parameter: Any) -> None:
    """Mark the last stage's copy of a matrix that it shares with the first stage."""
    parameter.ds_pipe_replicated = True


def is_copy(parameter: Any) -> bool:
    """Return whether another stage counts a parameter."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def description(model: torch.nn.Module) -> dict[str, Any]:
    """Return what a file of weights says about the stage; {} if the model is complete."""
    stage = getattr(model, STAGE, None)
    return {} if stage is None else {STAGE: {"index": stage.index, "layers": list(stage.layers)}}


@torch.no_grad()
def sum_shared(engine: Any, parameter: Any) -> None:
    """Sum the gradient of the shared matrix over the first and last stage, and reduce gradients.

    Both stages must call this after the last backward pass of a step, in which gradients must not
    have been reduced over replicas. Under stage 2, they are reduced in each backward pass.
    """
    groups = groups_of(engine.optimizer)
    assert groups is not None and engine.zero_optimization_stage() == 1
    if hasattr(engine.optimizer, "fp32_groups_gradients"):  # BF16_Optimizer's float32 sums
        gradient = parameter._hp_grad
    else:
        gradient = engine.optimizer.get_gradient_for_reduction(parameter)
    distributed.all_reduce(gradient, group=groups.ends)
    engine.set_gradient_accumulation_boundary(True)
    engine.allreduce_gradients()
