"""The float32 master weights of a DeepSpeed engine (0.19.8), for what changes or averages them."""

from typing import Any

import torch

CHUNK_VALUES = 1 << 22  # changed at once, so that little memory is needed besides


def master_partitions(engine: Any) -> list[torch.Tensor]:
    """Return this rank's flat partitions of master weights."""
    names = (
        "fp32_partitioned_groups_flat",  # stage 3
        "fp32_groups_flat_partition",  # BF16_Optimizer
        "single_partition_of_fp32_groups",
    )
    name = next(name for name in names if hasattr(engine.optimizer, name))
    return list(getattr(engine.optimizer, name))
