"""The settings that every run has: one field per flag, with its unit, bounds and help.

The settings of optional parts are defined in their modules; `zerolm.parts.settings.RunSettings`
combines all settings.

A setting that the user does not give is None here, until resolving the settings replaces it with a
default that suits the model. Values that belong in DeepSpeed's JSON have no flags. Must not depend
on data, the model or the DeepSpeed JSON. Standard library only, so that `--help` is instant.
"""

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zerolm.common.values import parse_number
from zerolm.config.flag import count, flag, real, switch
from zerolm.config.part import Part
from zerolm.optim.schedule import SCHEDULES, WITH_DECAY_TOKENS

COMMAND_LINE = "command line"
NOT_GIVEN: Any = None  # a setting for which a default will be filled in
CONCAT, BEST_FIT = "concat", "best_fit"  # --packing
VARLEN = "varlen"
ATTENTION_IMPLEMENTATIONS = (
    *("auto", "eager", "sdpa", VARLEN, "flex_attention"),
    *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
)
PRECISIONS = ("bf16", "fp16", "fp32")
HIGHEST, HIGH = "highest", "high"  # --float32_matmul, with torch's names
SELECTIVE = "selective"
# Values of --gradient_checkpointing. False: keep all activations; True: recompute each block;
# "selective": recompute everything except matmuls and attention.
Recompute = bool | str
RECOMPUTE_NAMES: dict[str, Recompute] = {
    "full": True,
    "selective": SELECTIVE,
    "off": False,
    "true": True,
    "false": False,
}
# Flags for a first run: `--help` shows only these, `--help all` shows all.
FIRST_FLAGS = (
    *("data", "val_data", "model_config", "deepspeed_config", "run_dir", "total_tokens"),
    *("seq_len", "batch_tokens", "micro_batch_size", "learning_rate"),
)
WANDB_MODES = ("auto", "online", "offline", "off")
REFUSE, WARN, REDISTRIBUTE = EPOCH_POLICIES = ("refuse", "warn", "redistribute")
GROUPS = {
    "data": "data",
    "batch": "batch",
    "budget": "budget and schedule",
    "model": "model",
    "run": "run",
    "evaluation": "evaluation and samples",
    "stability": "stability",
    "trackers": "trackers",
}


@dataclass(frozen=True)
class Settings:
    """The settings that every run has; None means not given.

    Each field is a flag of the same name; `--help` shows its unit and default. Its type is that in
    a plan: a field without `| None` is None only until a default that suits the model is filled in.

    Attributes:
        parts: the optional parts of a run, whose flags a subclass adds.
    """

    parts: ClassVar[tuple[type[Part], ...]] = ()

    data: tuple[str, ...] = flag(
        "data",
        "list",
        "token shards, and their relative weight in the mixture; may be repeated (default: weights "
        "proportional to size)",
        shows="PATH[=WEIGHT]",
        default=(),
    )
    data_stage: tuple[str, ...] = flag(
        "data",
        "list",
        "change the mixture at a token count, with weights by directory name; sources that are not "
        "listed get weight 0; may be repeated",
        shows="TOKENS:NAME=W[,...]",
        default=(),
    )
    mixture_temperature: float | None = flag(
        "data",
        "real",
        "if --data has no weights: weights proportional to tokens^(1/X); X above 1 favors small "
        "sources (default: 1)",
        shows="X",
        minimum=0.1,
    )
    max_epochs: tuple[str, ...] = flag(
        "data",
        "list",
        "maximum number of epochs over each source, or over the named source; may be repeated",
        shows="[NAME=]N",
        default=(),
    )
    over_max_epochs: str | None = flag(
        "data",
        "text",
        "what to do if a source would exceed --max_epochs; redistribute: drop the source at that "
        "point and renormalize the other weights (default: refuse)",
        choices=EPOCH_POLICIES,
    )
    val_data: tuple[str, ...] = flag(
        "data", "list", "token shards for validation; may be repeated", shows="PATH", default=()
    )
    seq_len: int = count(
        "data",
        "tokens per sequence (default: 2048, or the model's maximum if less)",
        "TOKENS",
        changes_curve=True,
    )
    later_seq_len: int | None = count(
        "data",
        "order the data so that a branch with this longer --seq_len, a multiple of the present "
        "one, can continue with unread windows (default: --seq_len)",
        "TOKENS",
        changes_curve=True,
    )
    document_mask: bool = switch(
        "data",
        "let tokens attend only to tokens of their own document",
        changes_curve=True,
        # ulysses_sp.py, uattn_wrapper: discards the mask and uses causal attention
        not_with={
            "sequence": "DeepSpeed's attention discards every mask, so tokens would attend across "
            "documents"
        },
    )
    packing: str = flag(
        "data",
        "text",
        "concat: split concatenated documents; best_fit: pack complete documents, with the index "
        "that `zerolm data pack` writes",
        default=CONCAT,
        choices=(CONCAT, BEST_FIT),
        changes_curve=True,
    )
    num_workers: int = count("data", "data loader processes per rank", "N", minimum=0, default=0)
    data_cache: str | None = flag(
        "data",
        "text",
        "directory on each node for caching token shards from an object store (default: in the "
        "system's temporary directory)",
        shows="PATH",
    )
    data_cache_bytes: int | None = flag(
        "data",
        "bytes",
        "maximum size of --data_cache, shared by all ranks of a node (default: 32 GiB)",
        shows="BYTES",
        minimum=1,
    )
    eval_tokens: int | None = count(
        "data", "validation tokens per evaluation (default: 1M, or all if fewer)", "TOKENS"
    )

    batch_tokens: int = count(
        "batch",
        "tokens per optimizer step, over all devices (default: from the compute budget)",
        "TOKENS",
        changes_curve=True,
    )
    micro_batch_size: int = count(
        "batch",
        "sequences per device and micro-batch; auto: the largest that fits (default: auto)",
        "SEQUENCES|auto",
        follows=True,
    )
    batch_ramp_start: int | None = count(
        "batch",
        "batch size ramp: tokens of the first optimizer step",
        "TOKENS",
        changes_curve=True,
    )
    batch_ramp_tokens: int | None = count(
        "batch",
        "batch size ramp: number of tokens until the batch reaches --batch_tokens (default: 10%% "
        "of the total)",
        "TOKENS",
        changes_curve=True,
    )

    total_tokens: int = count(
        "budget",
        "tokens to train on (default: 20 per parameter)",
        "TOKENS",
        changes_curve=True,
    )
    learning_rate: float = real(
        "budget", "peak learning rate (default: from the compute budget)", changes_curve=True
    )
    min_learning_rate: float | None = real(
        "budget",
        "final learning rate of a decaying schedule (default: a tenth of the peak)",
        follows=True,
        changes_curve=True,
    )
    warmup_tokens: int | None = count(
        "budget",
        "length of the warm-up in tokens (default: 1%% of the total)",
        "TOKENS",
        minimum=0,
        changes_curve=True,
    )
    schedule: str | None = flag(
        "budget",
        "text",
        "learning rate schedule (default: cosine)",
        choices=tuple(SCHEDULES),
        changes_curve=True,
    )
    decay_tokens: int | None = count(
        "budget",
        f"length of the decay in tokens, for {WITH_DECAY_TOKENS} (default: 20%% of the total)",
        "TOKENS",
        changes_curve=True,
    )
    weight_decay: float = real(
        "budget", "weight decay of matrices (default: 0.1)", changes_curve=True
    )
    beta1: float | None = real(
        "budget", "optimizer's beta1 (default: 0.9)", below=1.0, changes_curve=True
    )
    beta2: float | None = real(
        "budget", "optimizer's beta2 (default: 0.95; Lion 0.99)", below=1.0, changes_curve=True
    )
    model_config: str | None = flag(
        "model", "text", "config.json of a Hugging Face causal language model", shows="PATH"
    )
    init_from: str | None = flag(
        "model",
        "text",
        "existing weights to start from: a Hugging Face model directory or hub id, or a run",
        shows="MODEL|RUN[@STEP]",
        changes_curve=True,
        unchangeable="the run was initialized with the old value",
    )
    init_optimizer: bool = switch(
        "model",
        "with --init_from RUN: also load the optimizer states of that run",
        changes_curve=True,
        unchangeable="the run was initialized with the old value",
    )
    gradient_checkpointing: bool | str = flag(
        "model",
        "recompute",
        "recompute activations in the backward pass to save memory; selective keeps the outputs of "
        "matmuls and fused attention (default: off; without a value: full)",
        shows="full|selective|off",
        default=False,
    )
    attn_implementation: str = flag(
        "model",
        "text",
        f"attention kernel: {', '.join(ATTENTION_IMPLEMENTATIONS)}",
        shows="KERNEL",
        default="auto",
        choices=ATTENTION_IMPLEMENTATIONS,
        follows=True,
        planned=True,
    )
    precision: str | None = flag(
        "model",
        "text",
        'precision of the weights, if the DeepSpeed JSON has "auto" or does not set it (default: '
        'with "auto" bf16, or fp32 on a device that emulates bf16; otherwise fp32)',
        choices=PRECISIONS,
        planned=True,
    )
    float32_matmul: str = flag(
        "model",
        "text",
        "precision of float32 matmuls on a GPU; high: TF32, faster, with a 10-bit mantissa",
        default=HIGHEST,
        choices=(HIGHEST, HIGH),
        changes_curve=True,
    )
    compile: bool = switch(
        "model",
        "compile the model's blocks and the loss with torch.compile",
        planned=True,
        not_with=dict.fromkeys(("tensor", "sequence"), "losses were not compared with PyTorch's"),
    )
    loss_chunk_tokens: int = count(
        "model",
        "compute the loss for this many tokens at a time, to save memory; 0: for all tokens at "
        "once (default: 0, or 512 MiB of logits per chunk if all logits exceed 16 GiB)",
        "N",
        minimum=0,
        follows=True,
        planned=True,
        not_with={"tensor": "DeepSpeed replaces the output head"},
    )
    seed: int = flag(
        "model",
        "count",
        "seed for the initial weights and the data order",
        shows="N",
        default=0,
        minimum=0,
        changes_curve=True,
    )

    run_dir: str | None = flag(
        "run",
        "text",
        "run directory; if it contains a checkpoint, the run resumes from it",
        shows="PATH",
        of_one_run=True,
    )
    deepspeed_config: str | None = flag("run", "text", "DeepSpeed JSON file", shows="PATH")
    nvme_path: str | None = flag(
        "run",
        "text",
        "directory on each host's local NVMe disk, for a profile that offloads to NVMe",
        shows="PATH",
    )
    shard_within: int | None = count(
        "run",
        "with ZeRO-1 in bf16: shard optimizer states within groups of N consecutive ranks, such as "
        "the ranks on one host (default: over all ranks)",
        "N",
        minimum=2,
        not_with=dict.fromkeys(
            ("experts", "stages"), "both divide the optimizer states over groups of ranks"
        ),
    )
    expert_parallel: int | None = count(
        "run",
        "divide the experts of a mixture over N consecutive ranks of a host, which exchange "
        "tokens (default: each rank has all experts, or its shard of ZeRO-3)",
        "N",
        minimum=2,
        planned=True,
        not_with=dict.fromkeys(("tensor", "sequence"), "losses were not compared with PyTorch's"),
    )
    settings: str | None = flag(
        "run",
        "text",
        "JSON file with settings, or the run.json of a run; flags take precedence",
        shows="PATH",
        saved=False,
    )
    branch: str | None = flag(
        "run",
        "text",
        "start from a checkpoint of another run (default: its newest), with that run's settings; "
        "flags take precedence",
        shows="RUN[@STEP]",
        of_one_run=True,
    )
    log_interval: int = count(
        "run", "optimizer steps between metrics (default: from the number of steps)", "STEPS"
    )
    eval_interval: int | None = count(
        "run", "optimizer steps between evaluations (default: from the number of steps)", "STEPS"
    )
    checkpoint_interval: int = count(
        "run", "optimizer steps between checkpoints (default: from the number of steps)", "STEPS"
    )
    async_checkpoint: bool = switch(
        "run",
        "write checkpoints in the background; with --no-async_checkpoint, training waits for each "
        "one",
        True,
    )
    checkpoint_keep: int = count("run", "number of newest checkpoints to keep", "N", default=3)
    checkpoint_keep_tokens: int | None = count(
        "run", "also keep, permanently, one checkpoint per this many tokens", "TOKENS"
    )
    checkpoint_keep_best: int = count(
        "run",
        "also keep the N checkpoints with the lowest eval/loss",
        "N",
        minimum=0,
        default=0,
    )
    checkpoint_read_back: bool = switch(
        "run",
        "read each checkpoint file back from disk before it counts as written",
    )
    checkpoint_failures: int = count(
        "run",
        "number of consecutive intervals without a successful save after which the run ends",
        "N",
        default=3,
    )
    stop_after: float | None = flag(
        "run",
        "duration",
        "save and stop with exit code 75 within this time, e.g. 3h50m or 90s",
        shows="DURATION",
        minimum=1.0,
    )
    hang_timeout: float = flag(
        "run",
        "duration",
        "time without progress after which the run ends and names the rank at fault; three times "
        "as long until the first step is done; 0: never",
        shows="DURATION",
        minimum=0.0,
        default=600.0,
    )
    profile: tuple[int, int] | None = flag(
        "run",
        "steps",
        "record a torch profiler trace of these steps and, on a GPU, a memory snapshot",
        shows="FIRST:LAST",
        saved=False,
    )
    upload_to: str | None = flag(
        "run",
        "text",
        "object store to copy checkpoints to, e.g. s3://bucket/first, or off; a --run_dir without "
        "a checkpoint is restored from the store",
        shows="URL",
        of_one_run=True,
    )
    upload_keep: int = count(
        "run",
        "number of newest checkpoints to keep in the object store; 0: all",
        "N",
        minimum=0,
        default=0,
    )
    upload_wait: float = flag(
        "run",
        "duration",
        "maximum time to wait for uploads at the end of the run",
        shows="DURATION",
        default=300.0,
        minimum=0.0,
    )
    report_interval: float = flag(
        "run",
        "duration",
        "time between updates of report.html, which is also written at the end; 0: never",
        shows="DURATION",
        default=180.0,
        minimum=0.0,
    )
    accept_changes: bool = switch(
        "run",
        "resume even if the data or settings that affect the loss curve have changed",
        saved=False,
    )
    check: bool = switch(
        "run", "check everything, print the plan of the run, and stop", saved=False
    )
    world_size: int | None = count(
        "run", "with --check: number of devices to assume", "N", saved=False
    )
    hardware: str | None = flag(
        "run",
        "text",
        "with --check: type of device to assume, such as H100 or cpu (default: this machine's)",
        shows="NAME|FILE",
        saved=False,
    )

    downstream_interval: int | None = count(
        "evaluation",
        "optimizer steps between evaluations on downstream tasks (default: --eval_interval)",
        "STEPS",
        follows=True,
    )

    spike_threshold: float = flag(
        "stability",
        "real",
        "robust z-score above which a loss or gradient norm counts as a spike; 0: never",
        shows="X",
        default=6.0,
        minimum=0.0,
    )
    spike_window: int = count(
        "stability",
        "window: number of accepted steps that form the baseline, and over which spikes are "
        "counted",
        "STEPS",
        default=128,
        minimum=4,
    )
    skip_spikes: bool = switch(
        "stability",
        "skip the optimizer update of a step with a spike; non-finite steps are always skipped",
        True,
    )
    cooldown_after: int = count(
        "stability",
        "number of spikes in the window that starts a cooldown with a lower learning rate; 0: "
        "never",
        "N",
        default=3,
        minimum=0,
    )
    cooldown_factor: float = flag(
        "stability",
        "real",
        "factor applied to the learning rate during a cooldown",
        shows="X",
        default=0.5,
        minimum=0.0,
        below=1.0,
    )
    cooldown_steps: int = count("stability", "length of a cooldown", "STEPS", default=100)
    rollback_after: int = count(
        "stability",
        "number of spikes in the window that makes the run roll back to an earlier checkpoint; 0: "
        "never",
        "N",
        default=6,
        minimum=0,
    )
    rollback_margin: int = count(
        "stability",
        "number of steps before the first spike whose data is also skipped after a rollback "
        "(default: 1%% of the run, up to 100)",
        "STEPS",
        minimum=0,
    )
    max_rollbacks: int = count(
        "stability",
        "number of rollbacks after which the run gives up with exit code 76",
        "N",
        default=5,
        minimum=0,
    )
    max_skips: int = count(
        "stability",
        "give up if this many of the last 1000 steps were spikes, skipped or not; 0: no limit",
        "N",
        default=30,
        minimum=0,
    )

    wandb: str = flag(
        "trackers",
        "text",
        "auto: online if a W&B key is configured, else offline",
        default="auto",
        choices=WANDB_MODES,
        tracker="zerolm.tracking.wandb:WandbTracker",
    )
    wandb_project: str | None = flag(
        "trackers", "text", "W&B project (default: zerolm)", shows="NAME"
    )
    wandb_entity: str | None = flag(
        "trackers", "text", "W&B user or team (default: the key's)", shows="NAME"
    )
    wandb_group: str | None = flag(
        "trackers", "text", "W&B group (default: the name of the W&B run)", shows="NAME"
    )
    wandb_name: str | None = flag(
        "trackers",
        "text",
        "name of the W&B run (default: the name of --run_dir)",
        shows="NAME",
        of_one_run=True,
    )
    wandb_tags: str | None = flag("trackers", "text", "tags for the W&B run", shows="A,B")
    tensorboard: bool = switch(
        "trackers",
        "also write TensorBoard event files",
        tracker="zerolm.tracking.tensorboard:TensorboardTracker",
    )

    local_rank: int = flag("hidden", "count", "", default=0, minimum=0, saved=False)

    explicit: frozenset[str] = frozenset()  # names given by a flag, in a file, or for the trunk
    inherited: frozenset[str] = frozenset()  # names of settings that --branch copied from a trunk
    origins: dict[str, str] = field(default_factory=dict)  # {name: `file: key`} of explicit values

    def where(self, name: str) -> str:
        """Return the start of a message about a setting: where it was given, as `file: key`."""
        return self.origins.get(name, f"default: --{name}")

    def resolved(self) -> "Settings":
        """Return these settings, in which every default is filled in, as the types of fields say.

        Other fields may be None if they do not apply: evaluation settings without validation data,
        or schedule settings if the DeepSpeed JSON defines the schedule.
        """
        missing = [
            item.name
            for item in dataclasses.fields(self)
            if isinstance(item.type, type) and getattr(self, item.name) is None
        ]
        assert not missing, f"not resolved: {missing}"
        return self

    @property
    def rows_differ(self) -> bool:
        """Whether sequences may have different numbers of targets."""
        return self.document_mask or self.packing == BEST_FIT

    def to_json(self) -> dict[str, Any]:
        """Return the settings for run.json, from which `--settings` restores equal settings."""
        saved = [name for name, about in flags_of(self).items() if about["saved"]]
        values = {name: getattr(self, name) for name in saved}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    def kept_bytes(self) -> int:
        """Return the number of bytes per parameter that the optimizer stores for all parts."""
        return sum(part.state_bytes(self) for part in self.parts)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the value of a part's flag."""


def flags_of(settings: Settings | type[Settings]) -> dict[str, Any]:
    """Return {name: metadata} for the fields that are flags."""
    return {item.name: item.metadata for item in dataclasses.fields(settings) if item.metadata}


TRACKERS: dict[str, str] = {  # {name of a tracker, and of its flag: `module:class`}
    name: about["tracker"] for name, about in flags_of(Settings).items() if about["tracker"]
}


def split_weight(source: str) -> tuple[str, float | None]:
    """Split a value of `--data` into path and weight; the weight is None if it is not given.

    An existing directory has no weight: the `=` of `day=20260101` is part of its name, like an `=`
    before text that is not a number.
    """
    path, equals, weight = source.rpartition("=")
    if equals and not Path(source).is_dir():
        with contextlib.suppress(ValueError):
            return path, parse_number(weight)
    return source, None
