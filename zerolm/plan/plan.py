"""`Plan`: the complete, resolved description of a run, identical on every rank.

Preflight builds the plan before the process group exists. The training loop, the checkpoint code
and the start-up summary read it. A plan must not be changed afterwards.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolm.common.provenance import versions
from zerolm.config.settings import HIGH, Settings
from zerolm.data import epochs
from zerolm.data.mixture import Mixture
from zerolm.data.order import Order
from zerolm.data.packing import num_rows
from zerolm.distributed.device import gpu_library_versions
from zerolm.distributed.layout import Layout
from zerolm.ds_config import topology
from zerolm.ds_config.profile import Profile
from zerolm.model.model import Model
from zerolm.optim.schedule import BatchSchedule, LearningRate
from zerolm.plan.peak_flops import TF32
from zerolm.pretrained.initial_source import InitialSource
from zerolm.run_dir.records import BranchRecord
from zerolm.shards.reader import Source
from zerolm.shards.token_bytes import TokenBytes

DECISIVE_PACKAGES = ("zerolm", "torch", "deepspeed", "transformers")  # equal on all hosts


@dataclass(frozen=True)
class Plan:
    """The resolved description of a run.

    Attributes:
        settings: resolved settings, whose `to_json()` reproduces the run.
        ds: the DeepSpeed JSON as passed to `deepspeed.initialize`.
        flops_per_token: training FLOPs per token, without recomputation.
        weights: sampling weights of the sources at the start of the run, not normalized.
        mixture: the weights of all blends, and the sources' epoch limits.
        val_sequences: sequences per evaluation over all validation sources; 0 if there are none.
        device: device type of the ranks (as in `Device`).
        device_name: model of this rank's device.
        initial: existing weights that the run starts from; None for random weights.
        learning_rate: schedule over tokens; None if the DeepSpeed JSON has a scheduler.
        total_sequences: sequences that the complete run reads; its last batch is full.
        total_steps: optimizer steps of the complete run.
        data_fingerprint: hex SHA-256 that identifies the training sources' tokens.
        derived: figures to print when the run starts.
        changed: {setting: (old, new)} for a resume with --accept_changes.
        token_bytes: bytes of text that each token encodes; None if unknown.
        branch: where this run branched off from another run; None if it is not a branch.
        branch_from: the parent run's checkpoint directory; None once this run has its own
            checkpoints.
    """

    settings: Settings
    run_dir: Path
    model: Model
    ds: Profile
    flops_per_token: float
    sources: list[Source]
    source_names: list[str]
    weights: list[float]
    mixture: Mixture
    val_sources: list[Source]
    val_source_names: list[str]
    val_sequences: int
    world_size: int
    layout: Layout
    device: str
    device_name: str
    batch_schedule: BatchSchedule
    initial: InitialSource | None
    learning_rate: LearningRate | None
    total_sequences: int
    total_steps: int
    data_fingerprint: str
    derived: dict[str, str]
    notices: list[str]
    changed: dict[str, tuple[Any, Any]]
    token_bytes: TokenBytes | None = None
    branch: BranchRecord | None = None
    branch_from: Path | None = None

    @property
    def matmul_precision(self) -> str:
        """The profile's `compute_precision`, or `tf32` if float32 matmuls use TF32."""
        return TF32 if self.settings.float32_matmul == HIGH else self.ds.compute_precision

    def summary(self) -> str:
        """Return the derived figures, the table of epochs and the notices, one per line."""
        width = max(map(len, self.derived))
        lines = [f"{name:<{width}}  {value}" for name, value in self.derived.items()]
        if len(self.sources) > 1 or any(self.mixture.caps):
            lines += epochs.table(
                self.mixture,
                self.order(),
                self.source_names,
                self.total_sequences,
                self.settings.seq_len,
            )
        return "\n".join([*lines, *(f"note: {notice}" for notice in self.notices)])

    def order(self) -> Order:
        """Return the order of the training data."""
        seq_len, packing = self.settings.seq_len, self.settings.packing
        sizes = [num_rows(source, seq_len, packing) for source in self.sources]
        return self.mixture.order(sizes, self.settings.seed)

    def resharded(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return the differences in sharding between a checkpoint and this run, each as `old ->
        new`.
        """
        return topology.changes(manifest, self.ds, self.layout)

    def fingerprint(self) -> str:
        """Return a hash of everything that must be equal on all ranks."""
        installed = versions()
        content = {
            "settings": self.settings.to_json(),
            "ds_config": self.ds.json,
            "model_config": self.model.config.to_dict(),
            "data": self.data_fingerprint,
            "validation": [source.fingerprint for source in self.val_sources],
            "world_size": self.world_size,
            "initial_weights": self.initial.digest if self.initial else None,
            "versions": [installed.get(package) for package in DECISIVE_PACKAGES],
            "device": self.device if self.device == "cpu" else [self.device, self.device_name],
            "libraries": gpu_library_versions(),
        }
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
