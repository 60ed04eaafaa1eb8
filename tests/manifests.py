"""What each manifest of a checkpoint has, for tests that write their own."""

from typing import Any

FACTS: dict[str, Any] = {  # that the trainer gives the writer
    "optimizer": "adamw", "data_fingerprint": "0" * 64, "precision": "bf16", "model_config": {},
}  # fmt: skip
WRITTEN: dict[str, Any] = {"world_size": 1, "zero_stage": 2, **FACTS}
