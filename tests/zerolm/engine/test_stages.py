"""What DeepSpeed's optimizer does otherwise for a pipeline stage than for tensor parallelism."""

from types import SimpleNamespace

import pytest
import torch

from zerolm.engine import gradient_reduction, stages
from zerolm.engine.stages import StageGroups


def groups(stage: int, replicas: int) -> StageGroups:
    """Groups without processes."""
    found = object.__new__(StageGroups)
    found.stages, found.stage, found.replicas, found.replica = 2, stage, replicas, 0
    return found


def engine(mpu) -> SimpleNamespace:
    """As much of a BF16_Optimizer's engine as the choice of a reduction needs."""
    optimizer = SimpleNamespace(
        mpu=mpu, fp32_groups_gradients=[], grad_acc_dtype=torch.float32, optimizer=None
    )
    return SimpleNamespace(
        optimizer=optimizer, gradient_average=True, communication_data_type=torch.float32,
        _config=SimpleNamespace(_param_dict={}), zero_optimization_stage=lambda: 1,
        postscale_gradients=lambda: True, gradient_predivide_factor=lambda: 1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mpu", "reduces"),
    [(None, True), (groups(0, 2), True), (groups(1, 1), False), (SimpleNamespace(), False)],
    ids=["replicas", "stages", "one replica", "tensor"],
)
def test_the_gradients_of_a_stage_are_reduced_to_their_owners(monkeypatch, mpu, reduces):
    """DeepSpeed would all-reduce them, which sends twice the bytes."""
    monkeypatch.setattr(gradient_reduction.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(
        gradient_reduction, "OwnerReduction", lambda *_, **__: SimpleNamespace(finish=lambda: None)
    )
    given = engine(mpu)
    assert (gradient_reduction.reduce_to_owners(given) is not None) == reduces
    assert hasattr(given, "buffered_allreduce_fallback") == reduces


def test_every_stage_counts_in_deepspeeds_norm_but_a_copy_does_not():
    """DeepSpeed asks for the tensor-parallel rank, and for its own mark on parameters."""
    from deepspeed.utils.bwc import (
        bwc_pipeline_parallel_world_size,
        bwc_tensor_model_parallel_rank,
        bwc_tensor_model_parallel_world_size,
    )

    for stage in (0, 1):
        mpu = groups(stage, 2)
        assert bwc_tensor_model_parallel_rank(mpu) == 0
        assert bwc_tensor_model_parallel_world_size(mpu) == 1
        assert bwc_pipeline_parallel_world_size(mpu) == 2
        assert mpu.get_model_parallel_rank() == stage  # in the names of files
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert not stages.is_copy(parameter)
    stages.mark_copy(parameter)
    from deepspeed.runtime.zero.stage_1_and_2 import PIPE_REPLICATED

    assert getattr(parameter, PIPE_REPLICATED) and stages.is_copy(parameter)
