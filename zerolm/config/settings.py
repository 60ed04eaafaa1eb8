"""The settings of a run: one field per flag.

What there is to set, with its unit, bounds and help; flags.py reads it. Knows no data, no model and
no DeepSpeed JSON: a setting that was not given stays None here and gets "a default that suits the
model size" in resolution.py. Everything that DeepSpeed's JSON already says has no flag. Standard
library only: `--help` is instant.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerolm.schedule import SCHEDULES
from zerolm.values import parse_number

COMMAND_LINE = "command line"
CONCAT, BEST_FIT = "concat", "best_fit"  # --packing: cut from all the text, or whole documents
ATTENTION_IMPLEMENTATIONS = (
    *("auto", "eager", "sdpa", "flex_attention"),
    *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
)
HIGHEST, HIGH = "highest", "high"  # --float32_matmul, in torch's words
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


def _flag(
    group: str,
    kind: str,
    help: str,
    *,
    shows: str = "",
    default: Any = None,
    minimum: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    saved: bool = True,
) -> Any:
    """Describe a field: how it is read, its bounds, its help. `saved`: kept in run.json."""
    about: dict[str, Any] = {
        "group": group,
        "kind": kind,
        "help": help,
        "shows": shows,
        "minimum": minimum,
    }
    about |= {"below": below, "choices": tuple(choices), "saved": saved}
    return field(default=default, metadata=about)


def _count(group: str, help: str, shows: str, minimum: int = 1, **more: Any) -> Any:
    return _flag(group, "count", help, shows=shows, minimum=minimum, **more)


def _real(help: str, minimum: float = 0.0, below: float | None = None) -> Any:
    return _flag("budget", "real", help, shows="X", minimum=minimum, below=below)


def _switch(group: str, help: str, default: bool = False, **more: Any) -> Any:
    return _flag(group, "switch", help, default=default, **more)


@dataclass(frozen=True)
class Settings:
    """What the user asked for. None: not given.

    Each field is the flag of its name; `--help` shows unit, bounds and default of each.
    """

    data: tuple[str, ...] = _flag(
        "data",
        "list",
        "token shards, and their share of the sequences in any unit; repeat it for several "
        "sources (default: shares by size)",
        shows="PATH[=WEIGHT]",
        default=(),
    )
    data_stage: tuple[str, ...] = _flag(
        "data",
        "list",
        "other weights from so many tokens on, by the names of the directories; what is not named "
        "rests; may be repeated",
        shows="TOKENS:NAME=W[,...]",
        default=(),
    )
    mixture_temperature: float | None = _flag(
        "data",
        "real",
        "without weights: shares by tokens^(1/X); above 1 small sources count more (default: 1)",
        shows="X",
        minimum=0.1,
    )
    max_epochs: tuple[str, ...] = _flag(
        "data",
        "list",
        "how often a run may read a source, of all or of one; may be repeated",
        shows="[NAME=]N",
        default=(),
    )
    over_max_epochs: str | None = _flag(
        "data",
        "text",
        "what becomes of a run that would read a source more often; redistribute: the source "
        "leaves, the others fill its place (default: refuse)",
        choices=EPOCH_POLICIES,
    )
    val_data: tuple[str, ...] = _flag(
        "data", "list", "token shards for validation; may be repeated", shows="PATH", default=()
    )
    seq_len: int | None = _count(
        "data", "tokens of a sequence (default: 2048, or the model's positions if less)", "TOKENS"
    )
    document_mask: bool = _switch("data", "tokens attend only to tokens of their own document")
    packing: str = _flag(
        "data",
        "text",
        "rows are cut from all the text, or hold whole documents by the index of data_prep pack "
        "(default: concat)",
        default=CONCAT,
        choices=(CONCAT, BEST_FIT),
    )
    num_workers: int = _count(
        "data", "loader processes per rank (default: 0)", "N", minimum=0, default=0
    )
    data_cache: str | None = _flag(
        "data",
        "text",
        "directory on each node for token shards that are in a store (default: in the system's "
        "directory for temporary files)",
        shows="PATH",
    )
    data_cache_bytes: int | None = _count(
        "data", "bound of that directory, for all ranks of a node (default: 32 GiB)", "BYTES"
    )
    eval_tokens: int | None = _count(
        "data", "validation tokens of an evaluation (default: 1M, or all if fewer)", "TOKENS"
    )

    batch_tokens: int | None = _count(
        "batch", "tokens of an optimizer step, over all devices (default: by compute)", "TOKENS"
    )
    micro_batch_size: int | None = _count(
        "batch",
        "sequences that a device takes at once, or auto: the most that fit (default: auto)",
        "SEQUENCES|auto",
    )
    batch_ramp_start: int | None = _count(
        "batch", "tokens of the first optimizer step; the batch grows from there", "TOKENS"
    )
    batch_ramp_tokens: int | None = _count(
        "batch", "tokens until the batch is full (default: 10%% of the total)", "TOKENS"
    )

    total_tokens: int | None = _count(
        "budget", "tokens to train on (default: 20 per parameter)", "TOKENS"
    )
    learning_rate: float | None = _real("peak learning rate (default: by compute)")
    min_learning_rate: float | None = _real("learning rate at the end (default: a tenth of peak)")
    warmup_tokens: int | None = _count(
        "budget", "tokens until the peak (default: 1%% of the total)", "TOKENS", minimum=0
    )
    schedule: str | None = _flag(
        "budget", "text", "shape of the learning rate (default: cosine)", choices=SCHEDULES
    )
    decay_tokens: int | None = _count(
        "budget", "with wsd: tokens of the decay (default: 20%% of the total)", "TOKENS"
    )
    weight_decay: float | None = _real("weight decay of matrices (default: 0.1)")
    beta1: float | None = _real("the optimizer's first beta (default: 0.9)", below=1.0)
    beta2: float | None = _real("the optimizer's second beta (default: 0.95; Lion 0.99)", below=1.0)

    model_config: str | None = _flag(
        "model", "text", "a Hugging Face config.json of a causal language model", shows="PATH"
    )
    gradient_checkpointing: bool | str = _flag(
        "model",
        "recompute",
        "compute activations again in the backward pass, to save memory; selective: but matrix "
        "products and attention (default: off, without a value: full)",
        shows="[full|selective|off]",
        default=False,
    )
    attn_implementation: str = _flag(
        "model",
        "text",
        f"attention kernel: {', '.join(ATTENTION_IMPLEMENTATIONS)} (default: auto)",
        shows="KERNEL",
        default="auto",
        choices=ATTENTION_IMPLEMENTATIONS,
    )
    float32_matmul: str = _flag(
        "model",
        "text",
        "products of a float32 run on a GPU; high: TF32, several times as fast, with 10 bits after "
        "the point (default: highest)",
        default=HIGHEST,
        choices=(HIGHEST, HIGH),
    )
    compile: bool = _switch("model", "compile each block of the model with torch.compile")
    loss_chunk_tokens: int | None = _count(
        "model",
        "tokens whose logits are there at a time; 0: all of a micro-batch (default: 0, unless they "
        "take more than 16 GiB in float32)",
        "N",
        minimum=0,
    )
    seed: int = _flag(
        "model",
        "count",
        "of the weights and of the data order (default: 0)",
        shows="N",
        default=0,
        minimum=0,
    )

    run_dir: str | None = _flag(
        "run",
        "text",
        "directory of this run; one that holds a checkpoint is resumed",
        shows="PATH",
    )
    deepspeed_config: str | None = _flag("run", "text", "DeepSpeed's own JSON file", shows="PATH")
    nvme_path: str | None = _flag(
        "run",
        "text",
        "directory on a local NVMe disk of each host, for a profile that offloads to it",
        shows="PATH",
    )
    settings: str | None = _flag(
        "run",
        "text",
        "a JSON file with settings, or the run.json of a run; flags win",
        shows="PATH",
        saved=False,
    )
    log_interval: int | None = _count("run", "optimizer steps between metrics", "STEPS")
    eval_interval: int | None = _count("run", "optimizer steps between evaluations", "STEPS")
    checkpoint_interval: int | None = _count("run", "optimizer steps between checkpoints", "STEPS")
    async_checkpoint: bool = _flag(
        "run",
        "switch",
        "write checkpoints behind training (default); --no-async_checkpoint waits for each",
        default=True,
    )
    checkpoint_keep: int = _count("run", "newest checkpoints to keep (default: 3)", "N", default=3)
    checkpoint_keep_tokens: int | None = _count(
        "run", "also keep a checkpoint every so many tokens, for good", "TOKENS"
    )
    checkpoint_keep_best: int = _count(
        "run", "also keep those of lowest eval/loss (default: 0)", "N", minimum=0, default=0
    )
    checkpoint_failures: int = _count(
        "run", "saves that fail in a row before the run ends (default: 3)", "N", default=3
    )
    stop_after: float | None = _flag(
        "run",
        "duration",
        "save, and stop with exit code 75, within this time, e.g. 3h50m or 90s",
        shows="DURATION",
        minimum=1.0,
    )
    hang_timeout: float = _flag(
        "run",
        "duration",
        "end the run, naming the rank, after this time without progress; 0: never (default: 10m)",
        shows="DURATION",
        minimum=0.0,
        default=600.0,
    )
    upload_to: str | None = _flag(
        "run",
        "text",
        "object store that checkpoints are copied to, e.g. s3://bucket/first, or off; a --run_dir "
        "without a checkpoint is restored from there",
        shows="URL",
    )
    upload_keep: int = _count(
        "run", "checkpoints to keep there (default: 0, all)", "N", minimum=0, default=0
    )
    upload_wait: float = _flag(
        "run",
        "duration",
        "how long the end of a run waits for its uploads (default: 5m)",
        shows="DURATION",
        default=300.0,
        minimum=0.0,
    )
    report_interval: float = _flag(
        "run",
        "duration",
        "how often report.html is written, and at the end; 0: never (default: 3m)",
        shows="DURATION",
        default=180.0,
        minimum=0.0,
    )
    accept_changes: bool = _switch(
        "run",
        "go on with a run although settings of its curve, or its data, are other ones now",
        saved=False,
    )
    check: bool = _switch(
        "run", "check everything, print what the run would be, and stop", saved=False
    )
    world_size: int | None = _count(
        "run", "with --check: number of devices of the run to check", "N", saved=False
    )

    hellaswag: str | None = _flag(
        "evaluation",
        "text",
        "HellaSwag to evaluate on: its JSON lines, or a data set of the hub",
        shows="PATH|ID",
    )
    hellaswag_items: int = _count(
        "evaluation",
        "the first so many items; 0: all (default: 1000)",
        "N",
        minimum=0,
        default=1000,
    )
    eval_tasks: tuple[str, ...] = _flag(
        "evaluation",
        "list",
        "tasks of lm-eval, with the extra lm-eval; may be repeated",
        shows="NAME[,NAME]",
        default=(),
    )
    eval_task_path: str | None = _flag(
        "evaluation", "text", "directory with further tasks, lm-eval's yaml files", shows="PATH"
    )
    eval_task_items: int | None = _count(
        "evaluation", "the first so many documents of each task (default: all)", "N"
    )
    downstream_interval: int | None = _count(
        "evaluation",
        "optimizer steps between HellaSwag and tasks (default: --eval_interval)",
        "STEPS",
    )
    prompts: str | None = _flag(
        "evaluation",
        "text",
        "prompts to write samples for: one a line, or .jsonl with prompt",
        shows="PATH",
    )
    sample_interval: int | None = _count(
        "evaluation",
        "tokens between samples (default: after each doubling of the tokens, and at the end)",
        "TOKENS",
    )
    sample_length: int = _count(
        "evaluation", "new tokens of a sample, at most (default: 64)", "TOKENS", default=64
    )
    temperature: float = _flag(
        "evaluation",
        "real",
        "of samples; 0: the likeliest token (default: 0.8)",
        shows="X",
        default=0.8,
        minimum=0.0,
    )
    top_k: int = _count(
        "evaluation", "likeliest tokens to draw from; 0: all (default: 50)", "N", 0, default=50
    )
    top_p: float = _flag(
        "evaluation",
        "real",
        "draw from the fewest tokens whose probabilities reach this; 1: all (default: 1)",
        shows="X",
        default=1.0,
        minimum=0.0,
    )

    spike_threshold: float = _flag(
        "stability",
        "real",
        "robust z-score above which a loss or gradient norm is a spike; 0: none is (default: 6)",
        shows="X",
        default=6.0,
        minimum=0.0,
    )
    spike_window: int = _count(
        "stability",
        "accepted steps that a step is compared with, and over which spikes count (default: 128)",
        "STEPS",
        default=128,
        minimum=4,
    )
    skip_spikes: bool = _switch(
        "stability", "refuse a step with a spike; non-finite ones always are (default: on)", True
    )
    adaptive_clip: float = _flag(
        "stability",
        "real",
        "clip gradient norms that are so many deviations above their moving mean (ZClip), besides "
        "gradient_clipping; 0: none (default: 0)",
        shows="Z",
        default=0.0,
        minimum=0.0,
    )
    cooldown_after: int = _count(
        "stability",
        "spikes in the window that lower the learning rate for a while; 0: never (default: 3)",
        "N",
        default=3,
        minimum=0,
    )
    cooldown_factor: float = _flag(
        "stability",
        "real",
        "what the learning rate is multiplied by then (default: 0.5)",
        shows="X",
        default=0.5,
        minimum=0.0,
        below=1.0,
    )
    cooldown_steps: int = _count(
        "stability", "steps until it is back (default: 100)", "STEPS", default=100
    )
    rollback_after: int = _count(
        "stability",
        "spikes in the window that roll the run back to a checkpoint from before them; 0: never "
        "(default: 6)",
        "N",
        default=6,
        minimum=0,
    )
    rollback_margin: int | None = _count(
        "stability",
        "good steps before the first spike whose data is skipped too (default: 1%% of the run, at "
        "most 100)",
        "STEPS",
        minimum=0,
    )
    max_rollbacks: int = _count(
        "stability",
        "rollbacks of a run before it gives up with exit code 76 (default: 5)",
        "N",
        default=5,
        minimum=0,
    )
    max_skips: int = _count(
        "stability",
        "spikes in 1000 steps at which it gives up; 0: no limit (default: 30)",
        "N",
        default=30,
        minimum=0,
    )

    wandb: str = _flag(
        "trackers",
        "text",
        "auto is online where a key is configured, else offline (default: auto)",
        default="auto",
        choices=WANDB_MODES,
    )
    wandb_project: str = _flag(
        "trackers", "text", "project (default: zerolm)", shows="NAME", default="zerolm"
    )
    wandb_entity: str | None = _flag(
        "trackers", "text", "user or team (default: that of the key)", shows="NAME"
    )
    wandb_group: str | None = _flag("trackers", "text", "group of related runs", shows="NAME")
    wandb_name: str | None = _flag(
        "trackers", "text", "name of the run (default: that of --run_dir)", shows="NAME"
    )
    wandb_tags: str | None = _flag("trackers", "text", "tags of the run", shows="A,B")
    tensorboard: bool = _switch("trackers", "write TensorBoard's event files as well")

    local_rank: int = _flag("hidden", "count", "", default=0, minimum=0, saved=False)

    explicit: frozenset[str] = frozenset()  # names that a flag or the settings file gave
    origins: dict[str, str] = field(default_factory=dict)  # `file: key` of each value given

    def where(self, name: str) -> str:
        """Say where a setting was given, to begin a message: `file: key`."""
        return self.origins.get(name, f"default: --{name}")

    def to_json(self) -> dict[str, Any]:
        """Return the settings for run.json; `--settings` reads them back to equal settings."""
        values = {name: getattr(self, name) for name, about in FLAGS.items() if about["saved"]}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


FLAGS: dict[str, Any] = {
    item.name: item.metadata for item in dataclasses.fields(Settings) if item.metadata
}


def split_weight(source: str) -> tuple[str, float | None]:
    """Split a value of `--data` into its path and its weight, None when it has none.

    Raises:
        ValueError: what stands after the last `=` is not a number.
    """
    path, equals, weight = source.rpartition("=")
    return (path, parse_number(weight)) if equals else (source, None)
