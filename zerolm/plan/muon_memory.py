"""Estimate the memory of DeepSpeed's Muon: momentum of matrices, AdamW states of the rest.

`zerolm.plan.memory` calls this for profiles with Muon. `zerolm.ds_config.muon.is_matrix` decides
which parameters are matrices.
"""

import math
from collections.abc import Mapping

from zerolm.ds_config import muon
from zerolm.ds_config.profile import Profile

Shapes = Mapping[str, tuple[int, ...]]


def state_bytes(shapes: Shapes, profile: Profile, world_size: int = 0) -> int:
    """Return the bytes of optimizer states: one momentum per matrix, two moments for the rest.

    ZeRO-1 and 2 keep the momentum in the precision of the reduced gradients, and a second copy for
    the current step, so that a step can be refused.

    Args:
        world_size: gives the bytes of the rank with the most. With 0, the bytes of all parameters,
            as in a checkpoint: a matrix that two ranks share counts once.
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
    """Return the bytes of one value of the momentum."""
    return 2 if keeps_full_matrices(profile) and profile.precision != "fp32" else 4


def keeps_full_matrices(profile: Profile) -> bool:
    """Return whether a rank keeps the full momentum of every matrix in its shard: ZeRO-1 and 2."""
    return (
        profile.uses_muon
        and profile.zero_stage in (1, 2)
        and profile.optimizer_offload == "none"
        and not profile.uses_bf16_optimizer
    )


def max_matrix_values(shapes: Shapes, profile: Profile, world_size: int) -> int:
    """Return how many values matrices have in a rank's shard, for the rank with the most.

    At ZeRO-1 and 2 matrices are laid out in a flat tensor that is divided equally over the ranks. A
    rank keeps the full gradient and momentum of each matrix that its shard overlaps, so even with
    many ranks some rank keeps the largest matrix.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, get_partition_info, 0.19.8.
    """
    numels = _numels(shapes)
    if profile.zero.get("round_robin_gradients"):
        numels = [numel for first in range(world_size) for numel in numels[first::world_size]]
    alignment = 2 * world_size
    shard = -(-sum(numels) // alignment) * alignment // world_size
    values, start = [0] * world_size, 0
    for numel in numels:
        for rank in range(start // shard, (start + numel - 1) // shard + 1):
            values[rank] += numel
        start += numel
    return max(values)


def gradient_bytes(shapes: Shapes, profile: Profile, world_size: int) -> int:
    """Return the bytes of accumulated gradients at ZeRO-2, for the rank with the most.

    Gradients of matrices are full and in the precision of the weights. Without offload a rank also
    holds the larger of the orthogonalized updates and, if gradients are accumulated in another
    precision, those of the other parameters.
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
