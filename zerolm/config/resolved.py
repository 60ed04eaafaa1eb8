"""Settings in which nothing that every run needs is left open."""

import dataclasses
from dataclasses import dataclass

from zerolm.config.settings import Settings


@dataclass(frozen=True)
class Resolved(Settings):
    """Settings of a run after defaults and the DeepSpeed JSON have filled the gaps.

    These fields are never None here. Others may be: they belong to something the run does not have,
    such as an evaluation, or a schedule that the DeepSpeed JSON decides.
    """

    seq_len: int = 0
    batch_tokens: int = 0
    micro_batch_size: int = 0
    total_tokens: int = 0
    learning_rate: float = 0.0
    weight_decay: float = 0.0
    log_interval: int = 0
    checkpoint_interval: int = 0
    rollback_margin: int = 0
    loss_chunk_tokens: int = 0

    @classmethod
    def of(cls, settings: Settings) -> "Resolved":
        """Return the same settings with the narrower type."""
        values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)}
        missing = [name for name in cls.__annotations__ if values[name] is None]
        assert not missing, f"not resolved: {missing}"
        return cls(**values)
