"""A run's requirements for its hosts: ranks, space for checkpoints, and DeepSpeed operators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zerolm.common.errors import ConfigError
from zerolm.config.settings import Settings


@dataclass(frozen=True)
class Requirements:
    """A run's requirements for its hosts.

    Attributes:
        slots: {host: number of ranks}.
        checkpoint_bytes: size of one checkpoint; None if unknown.
        operators: returns the names of the DeepSpeed operators that the profile needs on a given
            device kind (`cuda` or `cpu`).
        deep: whether all shards were read completely and verified.
    """

    slots: Mapping[str, int]
    checkpoint_bytes: int | None
    operators: Callable[[str], Sequence[str]]
    deep: bool


def checkpoint_bytes(settings: Settings) -> int | None:
    """Return the bytes of one checkpoint; None if they cannot be computed from the configs."""
    config = settings.model_config or settings.init_from  # Model.load refuses hub names
    if config is None or settings.deepspeed_config is None:
        return None
    from zerolm.ds_config.profile import Profile
    from zerolm.model.model import Model
    from zerolm.plan import memory

    try:
        profile = Profile.read(settings.deepspeed_config)
        shapes = Model.load(config).shapes
        return memory.checkpoint_bytes(
            shapes,
            profile,
            kept_bytes=settings.kept_bytes(),
            experts=settings.expert_parallel or 1,
        )
    except ConfigError:
        return None


def required_operators(settings: Settings, device_kind: str) -> list[str]:
    """Return the names of the DeepSpeed operators that a run compiles on first use."""
    from zerolm.ds_config.host import needed_kernels
    from zerolm.ds_config.profile import Profile

    try:
        profile = Profile.read(settings.deepspeed_config or "")
    except ConfigError:
        return []
    operators = ["deepspeed_shm_comm"] if device_kind == "cpu" else []
    optimizer = {"adamw": "adam"}.get(profile.optimizer.kind, profile.optimizer.kind)
    if profile.optimizer_offload != "none" and optimizer in ("adam", "adagrad", "lion"):
        operators.append(f"cpu_{optimizer}")
    needed = [operator for operator, _, _ in needed_kernels(profile)]
    return list(dict.fromkeys(operators + needed))
