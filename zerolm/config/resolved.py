"""`Resolved`: the settings of a run with all defaults filled in."""

from dataclasses import dataclass
from typing import cast

from zerolm.config.settings import Settings


@dataclass(frozen=True)
class Resolved(Settings):
    """Settings completed from defaults and the DeepSpeed JSON.

    The fields below are never None. Others may be None if they do not apply: evaluation settings
    without validation data, for example, or schedule settings if the DeepSpeed JSON defines the
    schedule.
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

    @staticmethod
    def of(settings: Settings) -> "Resolved":
        """Return completed settings as this type, in which these fields are not optional."""
        missing = [name for name in Resolved.__annotations__ if getattr(settings, name) is None]
        assert not missing, f"not resolved: {missing}"
        return cast(Resolved, settings)
