"""Chooses whether gradients under ZeRO-1 and 2 are reduced to their owners or to all ranks.

DeepSpeed 0.19.8 all-reduces gradients, although each rank updates only its partition; zerolm makes
DeepSpeed reduce them to the owner, which halves the bytes sent
(zerolm/engine/gradient_reduction.py). The plan uses this module too, so it must not import torch.
"""

import math

KEY = "use_multi_rank_bucket_allreduce"  # in zero_optimization; true: DeepSpeed's own behavior
HOP_SECONDS = 1e-5  # a collective's latency per pair of neighbours in an NCCL ring
BYTES_PER_SECOND = 1e10  # per device between hosts: 100 Gbit/s
MAX_LATENCY = 0.25  # as a share of the transfer time; above it, one collective for all is faster
FAST_BYTES_PER_SECOND = 2.5e10  # 200 Gbit/s, one GPU's share on a host with eight A100s
DEEPSPEED_BUCKET = 500_000_000  # values that DeepSpeed flattens at stage 1, regardless of the JSON


def small_pieces_pay(num_values: int, num_calls: int, ranks: int) -> bool:
    """Return whether a separate collective for each owner is about as fast as one for all owners.

    Args:
        num_values: float32 values in all calls together.
    """
    return separate_calls_pay(4 * num_values, num_calls, ranks)


def pieces_save_time(num_values: int, num_calls: int, ranks: int, hosts: int) -> bool:
    """Return whether a collective for each owner in every micro-batch is faster than an all-reduce.

    An all-reduce also sends the sums back, but uses all links of a host at once.

    Args:
        num_values: float32 values in all calls together.
    """
    bandwidth = FAST_BYTES_PER_SECOND * max(1, ranks // hosts)
    return _latency(num_calls, ranks) < 4 * num_values / bandwidth


def separate_calls_pay(num_bytes: int, num_calls: int, ranks: int) -> bool:
    """Return whether the latency of separate collectives is small compared with their transfer
    time.

    A collective passes through all ranks in turn.

    Args:
        num_bytes: number of bytes in all calls together.
    """
    return _latency(num_calls, ranks) < MAX_LATENCY * num_bytes / BYTES_PER_SECOND


def _latency(num_calls: int, ranks: int) -> float:
    return num_calls * (ranks - 1) * HOP_SECONDS


def bucket_calls(num_values: int, bucket: int, ranks: int, num_groups: int) -> int:
    """Estimate the number of collectives that reduce a micro-batch's buckets to their owners."""
    return math.ceil(num_values / bucket) + ranks * num_groups
