"""`Resolved`: the settings of a run with all defaults filled in."""

from dataclasses import dataclass
from typing import cast

from zerolm.config.settings import Settings


@dataclass(frozen=True)
class Resolved(Settings):
    """Settings completed with defaults and values from the DeepSpeed JSON.

    The fields below are never None. Other fields may be None if they do not apply, as with
    evaluation settings without validation data, or schedule settings if the DeepSpeed JSON defines
    the schedule.
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
        """Cast completed settings to `Resolved`, in which the fields above are not optional."""
        missing = [name for name in Resolved.__annotations__ if getattr(settings, name) is None]
        assert not missing, f"not resolved: {missing}"
        return cast(Resolved, settings)
