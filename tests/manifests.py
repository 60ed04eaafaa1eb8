"""Manifests of checkpoints and of shards, for tests that write their own."""

from pathlib import Path
from typing import Any

from zerolm.common.files import write_json
from zerolm.common.records import with_digest

# What each manifest of a checkpoint has.
FACTS: dict[str, Any] = {  # that the trainer gives the writer
    "optimizer": "adamw", "data_fingerprint": "0" * 64, "precision": "bf16", "model_config": {},
}  # fmt: skip
WRITTEN: dict[str, Any] = {"world_size": 1, "zero_stage": 2, **FACTS}


def write_shard_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of token shards as a program does that knows of its digest."""
    write_json(directory / "manifest.json", with_digest(manifest))
