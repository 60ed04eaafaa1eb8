"""Which ranks get the sums of gradients at ZeRO-1 and 2: their owners, or all.

DeepSpeed 0.19.8 all-reduces, although each rank updates a partition only; zerolm lets it reduce to
the owner, which sends half of the bytes (zerolm/engine/gradient_reduction.py). The plan uses this
too, so it must not import torch.
"""

import math

KEY = "use_multi_rank_bucket_allreduce"  # of zero_optimization; true: as DeepSpeed does
HOP_SECONDS = 1e-5  # of a collective between two ranks, as NCCL's rings take
BYTES_PER_SECOND = 1e10  # of a device between hosts: 100 Gbit/s
MAX_LATENCY = 0.25  # of the time of the bytes; with more, one collective for all is faster
FAST_BYTES_PER_SECOND = 2.5e10  # 200 Gbit/s, as hosts with eight A100 have for each
DEEPSPEED_BUCKET = 500_000_000  # values that DeepSpeed flattens at stage 1, whatever the JSON says


def small_pieces_pay(num_values: int, num_calls: int, ranks: int) -> bool:
    """Return whether a call for the part of each owner is as good as one call for all.

    Args:
        num_values: of all calls, in float32.
    """
    return separate_calls_pay(4 * num_values, num_calls, ranks)


def pieces_save_time(num_values: int, num_calls: int, ranks: int, hosts: int) -> bool:
    """Return whether a call for each owner, in every micro-batch, is faster than an all-reduce.

    An all-reduce sends the sums back too, over all links of a host together.

    Args:
        num_values: of all calls, in float32.
    """
    bandwidth = FAST_BYTES_PER_SECOND * max(1, ranks // hosts)
    return _latency(num_calls, ranks) < 4 * num_values / bandwidth


def separate_calls_pay(num_bytes: int, num_calls: int, ranks: int) -> bool:
    """Return whether the latency of collectives is little beside the time of their bytes.

    A collective goes through all ranks, one after another.

    Args:
        num_bytes: of all calls.
    """
    return _latency(num_calls, ranks) < MAX_LATENCY * num_bytes / BYTES_PER_SECOND


def _latency(num_calls: int, ranks: int) -> float:
    return num_calls * (ranks - 1) * HOP_SECONDS


def bucket_calls(num_values: int, bucket: int, ranks: int, num_groups: int) -> int:
    """Return about how many calls reduce the buckets of a micro-batch, each to its owner."""
    return math.ceil(num_values / bucket) + ranks * num_groups
