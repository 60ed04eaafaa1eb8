"""Estimate the memory of DeepSpeed's Muon: momentum for matrices, AdamW states for the rest.

`zerolm.plan.memory` calls this for profiles with Muon. `zerolm.ds_config.muon.is_matrix` decides
which parameters are matrices.
"""

import math
from collections.abc import Mapping

from zerolm.ds_config import muon
from zerolm.ds_config.profile import Profile

Shapes = Mapping[str, tuple[int, ...]]


def state_bytes(shapes: Shapes, profile: Profile, world_size: int = 0) -> int:
    """Return the bytes of optimizer states: momentum for matrices, two moments for other
    parameters.

    ZeRO-1 and 2 keep the momentum in the precision of the reduced gradients. They also keep a
    second copy for the current step, so the step can be skipped.

    Args:
        world_size: number of ranks; the result is the memory of the rank that needs most. With 0,
            the result is the size in a checkpoint, where a matrix shared by two ranks is stored
            only once.
    """
    matrices = sum(_numels(shapes))
    others = sum(map(math.prod, shapes.values())) - matrices
    if not world_size:
        return _momentum_bytes(profile) * matrices + 8 * others
    if keeps_full_matrices(profile):
        momentum = 2 * _momentum_bytes(profile) * max_matrix_values(shapes, profile, world_size)
    else:
        momentum = _momentum_bytes(profile) * -(-matrices // world_size)
    return momentum + 8 * -(-others // world_size)


def _momentum_bytes(profile: Profile) -> int:
    """Return the number of bytes per momentum value."""
    return 2 if keeps_full_matrices(profile) and profile.precision != "fp32" else 4


def keeps_full_matrices(profile: Profile) -> bool:
    """Return whether each rank stores the full momentum of every matrix that its shard overlaps."""
    return (
        profile.uses_muon
        and profile.zero_stage in (1, 2)
        and profile.optimizer_offload == "none"
        and not profile.uses_bf16_optimizer
    )


def max_matrix_values(shapes: Shapes, profile: Profile, world_size: int) -> int:
    """Return the largest number of matrix values that any rank stores.

    ZeRO-1 and 2 lay out matrices in a flat tensor that is divided equally among the ranks. Each
    rank keeps the full gradient and momentum of every matrix that its shard overlaps, so even with
    many ranks, some rank keeps all of the largest matrix.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, get_partition_info, 0.19.8.
    """
    numels = _numels(shapes)
    alignment = 2 * world_size
    shard = -(-sum(numels) // alignment) * alignment // world_size
    values, start = [0] * world_size, 0
    for numel in numels:
        for rank in range(start // shard, (start + numel - 1) // shard + 1):
            values[rank] += numel
        start += numel
    return max(values)


def gradient_bytes(shapes: Shapes, profile: Profile, world_size: int) -> int:
    """Return the bytes of accumulated gradients under ZeRO-2, on the rank with the most.

    Matrix gradients are not sharded and have the precision of the weights. Without offload a rank
    also holds a second buffer for the orthogonalized updates. If gradients are accumulated in
    another precision, the buffer is at least as large as a copy of the other parameters' gradients.
    """
    value, accumulated = profile.weight_bytes, profile.gradient_bytes
    others = -(-(sum(map(math.prod, shapes.values())) - sum(_numels(shapes))) // world_size)
    matrices = max_matrix_values(shapes, profile, world_size)
    sums = value * matrices + accumulated * others
    if profile.optimizer_offload != "none":
        return sums
    return sums + value * max(matrices, others if accumulated != value else 0)


def _numels(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for name, shape in shapes.items() if muon.is_matrix(name, shape)]
