"""What a run will do, with nothing left open, and the figures that say so at its start."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolm import ds_config, epoch_plan, evaluation_rules, memory, topology
from zerolm.flops import TF32
from zerolm.mixture import Mixture
from zerolm.order import Order
from zerolm.packing import num_rows
from zerolm.parallel import Layout, part_of
from zerolm.provenance import versions
from zerolm.schedule import BatchSchedule, LearningRate
from zerolm.settings import HIGH, Settings
from zerolm.shards import Source
from zerolm.values import shown_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DECISIVE_PACKAGES = ("zerolm", "torch", "deepspeed", "transformers")  # alike on all hosts


@dataclass(frozen=True)
class Plan:
    """What a run will do, with nothing left open.

    Attributes:
        settings: resolved; their `to_json()` replays the run.
        shapes: of every parameter by name, tied ones once.
        ds_config: for `deepspeed.initialize`.
        precision: of the weights: `fp32`, `bf16` or `fp16`.
        compute_precision: of matrix products, which differs under torch_autocast.
        weights: of the sources at the start of the run, in any unit.
        mixture: these weights and those of later stages, and how often a source may be read.
        val_sequences: of one evaluation, over all validation sources; 0 without any.
        layout: which ranks share sequences.
        device: kind of the ranks' devices, `absent` when they are not here.
        accumulation: micro-batches of a rank in a full batch.
        learning_rate: of the tokens trained; None when the ds config has a scheduler.
        total_sequences: of the whole run, in whole batches.
        total_steps: optimizer steps of the whole run.
        data_fingerprint: hex SHA-256 over the training sources' tokens.
        derived: figures to print when the run starts.
        notices: what is allowed, but should be known.
        changed: old and new of each setting of the curve that --accept_changes goes on with.
    """

    settings: Settings
    model_config: "PretrainedConfig"
    shapes: dict[str, tuple[int, ...]]
    num_parameters: int
    flops_per_token: float
    ds_config: dict[str, Any]
    zero_stage: int
    precision: str
    compute_precision: str
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
    micro_batch_size: int
    accumulation: int
    batch_sequences: int
    batch_schedule: BatchSchedule
    learning_rate: LearningRate | None
    weight_decay: float
    total_sequences: int
    total_steps: int
    data_fingerprint: str
    derived: dict[str, str]
    notices: list[str]
    changed: dict[str, tuple[Any, Any]]

    @property
    def matmul_precision(self) -> str:
        """Return `compute_precision`, or `tf32` where that computes products of float32."""
        return TF32 if self.settings.float32_matmul == HIGH else self.compute_precision

    def summary(self) -> str:
        """Return the derived figures, the plan of epochs and the notices, a line each."""
        width = max(map(len, self.derived))
        lines = [f"{name:<{width}}  {value}" for name, value in self.derived.items()]
        if len(self.sources) > 1 or any(self.mixture.caps):
            assert self.settings.seq_len is not None
            lines += epoch_plan.table(
                self.mixture,
                self.order(),
                self.source_names,
                self.total_sequences,
                self.settings.seq_len,
            )
        return "\n".join([*lines, *(f"note: {notice}" for notice in self.notices)])

    def order(self) -> Order:
        """Return the order of the training data."""
        assert self.settings.seq_len is not None
        seq_len, packing = self.settings.seq_len, self.settings.packing
        sizes = [num_rows(source, seq_len, packing) for source in self.sources]
        return self.mixture.order(sizes, self.settings.seed)

    def cut_anew(self, manifest: Mapping[str, Any]) -> list[str]:
        """Say what of a checkpoint's topology is another one than this run's, `old -> new` each."""
        return topology.changes(
            manifest,
            world_size=self.world_size,
            zero_stage=self.zero_stage,
            ds_config=self.ds_config,
        )

    def fingerprint(self) -> str:
        """Return a hash of all that ranks must agree on before they train together."""
        installed = versions()
        what = {
            "settings": self.settings.to_json(),
            "ds_config": self.ds_config,
            "model_config": self.model_config.to_dict(),
            "data": self.data_fingerprint,
            "validation": [source.fingerprint for source in self.val_sources],
            "world_size": self.world_size,
            "versions": [installed.get(package) for package in DECISIVE_PACKAGES],
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def figures(plan: Plan) -> dict[str, str]:
    """Return the derived figures of a plan, by name, to print and to keep."""
    settings, steps = plan.settings, plan.total_steps
    assert settings.seq_len and settings.batch_tokens and settings.total_tokens
    states, host = memory.state_bytes(plan.shapes, plan.ds_config, plan.world_size)
    chunk = settings.loss_chunk_tokens or 0
    kept = memory.activation_bytes(
        part_of(plan.model_config, plan.layout),
        settings.seq_len // plan.layout.sequence,
        plan.precision,
        settings.gradient_checkpointing,
        plan.micro_batch_size,
        chunk,
    )
    offload = ds_config.optimizer_offload(plan.ds_config)
    lines = {
        "model": f"{plan.model_config.model_type}, {plan.num_parameters:,} parameters",
        "profile": f"ZeRO-{plan.zero_stage}, {_precision(plan)}, optimizer offload {offload}",
        "devices": ", ".join(
            filter(None, (f"{plan.world_size} x {plan.device}", plan.layout.describe()))
        ),
        "batch": f"{settings.batch_tokens:,} tokens = {plan.batch_sequences:,} sequences of "
        f"{settings.seq_len:,}",
        "accumulation": f"{plan.accumulation} x micro-batch {plan.micro_batch_size} x "
        f"{plan.layout.replicas} {'rank(s)' if plan.layout.replica_size == 1 else 'replica(s)'}",
        "steps": f"{steps:,} for {settings.total_tokens:,} tokens",
        "tokens per parameter": f"{settings.total_tokens / plan.num_parameters:.3g}",
        "learning rate": _learning_rate_line(plan),
        "FLOPs per token": f"{plan.flops_per_token:.4g}",
        "FLOPs of the run": f"{plan.flops_per_token * settings.total_tokens:.4g}",
        "memory per rank": f"{shown_bytes(states)} of model states on the device, "
        f"{shown_bytes(host)} on the host, about {shown_bytes(kept)} of activations",
        "epochs": ", ".join(
            f"{name} {epochs:.3g}"
            for name, epochs in zip(plan.source_names, _epochs(plan), strict=True)
        ),
        "data fingerprint": plan.data_fingerprint[:16],
        "checkpoints": f"every {settings.checkpoint_interval} steps, "
        f"{settings.checkpoint_keep} kept",
        "checkpoint size": shown_bytes(memory.checkpoint_bytes(plan.shapes, plan.ds_config)),
    }
    if plan.val_sources:
        lines["evaluation"] = (
            f"{plan.val_sequences:,} sequences every {settings.eval_interval} steps"
        )
    lines |= evaluation_rules.figures(settings)
    if chunk:
        lines["loss"] = f"the logits of {chunk:,} tokens at a time"
    if settings.batch_ramp_start:
        lines["batch ramp"] = (
            f"from {settings.batch_ramp_start:,} tokens over {settings.batch_ramp_tokens:,}"
        )
    return lines


def _precision(plan: Plan) -> str:
    if plan.matmul_precision == TF32:
        return f"{plan.precision}, matrix products in TF32"
    if plan.compute_precision == plan.precision:
        return plan.precision
    return f"{plan.precision} weights, {plan.compute_precision} arithmetic"


def _learning_rate_line(plan: Plan) -> str:
    settings = plan.settings
    if plan.learning_rate is None:
        kind = ds_config.block(plan.ds_config, "scheduler").get("type")
        return f"{kind} of the ds config, peak {settings.learning_rate:g}"
    line = f"{settings.schedule}, peak {settings.learning_rate:g} to {settings.min_learning_rate:g}"
    line += f", warm-up {settings.warmup_tokens:,} tokens"
    return line + (f", decay {settings.decay_tokens:,}" if settings.decay_tokens else "")


def _epochs(plan: Plan) -> list[float]:
    order = plan.order()
    return (order.counts(plan.total_sequences) / order.num_windows).tolist()
