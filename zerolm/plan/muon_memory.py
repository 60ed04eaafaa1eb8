"""Bytes that DeepSpeed's Muon keeps: momentum of whole matrices, AdamW states of the rest.

Must not decide which parameters are matrices: `zerolm.ds_config.muon.takes` does.
"""

import math
from collections.abc import Mapping

from zerolm.ds_config import muon
from zerolm.ds_config.profile import Profile

Shapes = Mapping[str, tuple[int, ...]]


def state_bytes(shapes: Shapes, profile: Profile, world_size: int = 0) -> int:
    """Return the bytes of the states: one momentum of matrices, AdamW's two of other parameters.

    ZeRO-1 and 2 keep the momentum in the precision of the gradients that they reduce, and a second
    one for the current step, so that a step can be refused.

    Args:
        world_size: returns the bytes of the fullest of that many ranks; 0: of all parameters, as in
            a checkpoint, where matrices that two ranks share count once.
    """
    matrices = sum(_numels(shapes))
    others = sum(map(math.prod, shapes.values())) - matrices
    if not world_size:
        return _momentum_bytes(profile) * matrices + 8 * others
    if keeps_whole_matrices(profile):
        momentum = 2 * _momentum_bytes(profile) * whole_values(shapes, profile, world_size)
    else:
        momentum = _momentum_bytes(profile) * -(-matrices // world_size)
    return momentum + 8 * -(-others // world_size)


def _momentum_bytes(profile: Profile) -> int:
    """Return the bytes of a value of the momentum."""
    return 2 if keeps_whole_matrices(profile) and profile.precision != "fp32" else 4


def keeps_whole_matrices(profile: Profile) -> bool:
    """Tell whether a rank keeps each matrix of which it has a part as a whole: ZeRO-1 and 2."""
    return (
        profile.uses_muon
        and profile.zero_stage in (1, 2)
        and profile.optimizer_offload == "none"
        and not profile.uses_bf16_optimizer
    )


def whole_values(shapes: Shapes, profile: Profile, world_size: int) -> int:
    """Return the values of the matrices that the fullest rank has a part of, at ZeRO-1 and 2.

    Matrices are laid out one after another in a flat tensor that ranks share equally; a rank keeps
    the whole gradient and momentum of each matrix that its share touches. So with many ranks each
    keeps at least the largest matrix.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, get_partition_info, 0.19.8.
    """
    numels = _numels(shapes)
    if profile.zero.get("round_robin_gradients"):
        numels = [numel for first in range(world_size) for numel in numels[first::world_size]]
    alignment = 2 * world_size
    share = -(-sum(numels) // alignment) * alignment // world_size
    values, start = [0] * world_size, 0
    for numel in numels:
        for rank in range(start // share, (start + numel - 1) // share + 1):
            values[rank] += numel
        start += numel
    return max(values)


def gradient_bytes(shapes: Shapes, profile: Profile, world_size: int) -> int:
    """Return the bytes of the fullest rank's accumulated gradients at ZeRO-2.

    Gradients of matrices are whole and in the precision of the weights. Without offload a rank also
    holds either the gradients of other parameters, in their accumulation precision, or at the end
    of a step the orthogonalised updates.
    """
    value, accumulated = profile.weight_bytes, profile.gradient_bytes
    others = -(-(sum(map(math.prod, shapes.values())) - sum(_numels(shapes))) // world_size)
    whole = whole_values(shapes, profile, world_size)
    sums = value * whole + accumulated * others
    if profile.optimizer_offload != "none":
        return sums
    return sums + value * max(whole, others if accumulated != value else 0)


def _numels(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for name, shape in shapes.items() if muon.is_matrix(name, shape)]
