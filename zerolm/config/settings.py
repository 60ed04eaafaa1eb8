"""The settings of a run: one field per flag, with its unit, bounds and help.

A setting that is not given is None here; resolving the settings replaces it by a default that
suits the model. Values that belong in DeepSpeed's JSON have no flag. Must not depend on data, the
model or the DeepSpeed JSON. Standard library only, so that `--help` is instant.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerolm.common.values import duration, parse_number
from zerolm.optim.schedule import SCHEDULES, WITH_DECAY_TOKENS

COMMAND_LINE = "command line"
CONCAT, BEST_FIT = "concat", "best_fit"  # --packing
VARLEN = "varlen"
ATTENTION_IMPLEMENTATIONS = (
    *("auto", "eager", "sdpa", VARLEN, "flex_attention"),
    *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
)
PRECISIONS = ("bf16", "fp16", "fp32")  # --precision
HIGHEST, HIGH = "highest", "high"  # --float32_matmul, as torch names them
SELECTIVE = "selective"
# Of --gradient_checkpointing. False: keep all activations; True: recompute each block;
# "selective": recompute all but matmuls and attention.
Recompute = bool | str
RECOMPUTE_NAMES: dict[str, Recompute] = {
    "full": True,
    "selective": SELECTIVE,
    "off": False,
    "true": True,
    "false": False,
}
# Of a first run; `--help` shows them, and `--help all` all.
FIRST_FLAGS = (
    *("data", "val_data", "model_config", "deepspeed_config", "run_dir", "total_tokens"),
    *("seq_len", "batch_tokens", "micro_batch_size", "learning_rate"),
)
OWN_TEXTS = "ranks that share a matrix would evaluate different texts"
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
    tracker: str = "",
    changes_curve: bool = False,
    unchangeable: str = "",
    follows: bool = False,
    of_one_run: bool = False,
    probed: bool = False,
    no_tensor_parallel: str = "",
) -> Any:
    """Describe a field; a default with a value is added to its help.

    Args:
        group: a key of `GROUPS`.
        kind: how its value is converted, a key of `zerolm.config.flags.CONVERTERS`.
        shows: placeholder of its value in the help.
        minimum, below: inclusive lower and exclusive upper bound.
        saved: it is saved in run.json.
        tracker: `module:class` of the `Tracker` that the flag switches on.
        changes_curve: a resume with another value changes the loss curve. In a run from before the
            setting existed it had the default value.
        unchangeable: why no resume may have another value, even with --accept_changes.
        follows: it follows from other settings or from the machine, so it is derived again in every
            run.
        of_one_run: a branch does not take it over from its trunk.
        probed: it changes the memory or the time of a step, so `plan --probe` runs with it.
        no_tensor_parallel: why it cannot be combined with tensor parallelism.
    """
    if help and kind not in ("switch", "recompute", "list") and default is not None:
        text = duration(default).removesuffix("00s") if kind == "duration" else default
        help += f" (default: {text:g})" if isinstance(text, float) else f" (default: {text})"
    about: dict[str, Any] = {
        **{"group": group, "kind": kind, "help": help, "shows": shows, "minimum": minimum},
        **{"below": below, "choices": tuple(choices), "saved": saved, "tracker": tracker},
        **{"changes_curve": changes_curve, "unchangeable": unchangeable, "follows": follows},
        **{"of_one_run": of_one_run, "probed": probed, "no_tensor_parallel": no_tensor_parallel},
    }
    return field(default=default, metadata=about)


def _count(group: str, help: str, shows: str, minimum: int = 1, **more: Any) -> Any:
    return _flag(group, "count", help, shows=shows, minimum=minimum, **more)


def _real(help: str, **more: Any) -> Any:
    return _flag("budget", "real", help, shows="X", minimum=0.0, changes_curve=True, **more)


def _switch(group: str, help: str, default: bool = False, **more: Any) -> Any:
    help += f" (default: {'on' if default else 'off'})"
    return _flag(group, "switch", help, default=default, **more)


@dataclass(frozen=True)
class Settings:
    """The settings as given by the user; None means not given.

    Each field is a flag of the same name; `--help` shows its unit and default.
    """

    data: tuple[str, ...] = _flag(
        "data",
        "list",
        "token shards, and their relative weight in the mixture; may be repeated (default: weights "
        "proportional to size)",
        shows="PATH[=WEIGHT]",
        default=(),
    )
    data_stage: tuple[str, ...] = _flag(
        "data",
        "list",
        "change the mixture at a token count, with weights by directory name; sources not "
        "named get weight 0; may be repeated",
        shows="TOKENS:NAME=W[,...]",
        default=(),
    )
    mixture_temperature: float | None = _flag(
        "data",
        "real",
        "if --data has no weights: weights proportional to tokens^(1/X); X above 1 favors small "
        "sources (default: 1)",
        shows="X",
        minimum=0.1,
    )
    max_epochs: tuple[str, ...] = _flag(
        "data",
        "list",
        "maximum number of epochs over each source, or over the named source; may be repeated",
        shows="[NAME=]N",
        default=(),
    )
    over_max_epochs: str | None = _flag(
        "data",
        "text",
        "what to do if a source would exceed --max_epochs; redistribute: drop it at "
        "that point and renormalize the other weights (default: refuse)",
        choices=EPOCH_POLICIES,
    )
    val_data: tuple[str, ...] = _flag(
        "data", "list", "token shards for validation; may be repeated", shows="PATH", default=()
    )
    seq_len: int | None = _count(
        "data",
        "tokens per sequence (default: 2048, or the model's maximum if less)",
        "TOKENS",
        changes_curve=True,
    )
    document_mask: bool = _switch(
        "data",
        "let tokens attend only to tokens of their own document",
        changes_curve=True,
    )
    packing: str = _flag(
        "data",
        "text",
        "concat: split concatenated documents into sequences; best_fit: pack complete "
        "documents into sequences, with the index that `data_prep pack` writes",
        default=CONCAT,
        choices=(CONCAT, BEST_FIT),
        changes_curve=True,
    )
    num_workers: int = _count("data", "data loader processes per rank", "N", minimum=0, default=0)
    data_cache: str | None = _flag(
        "data",
        "text",
        "directory on each node that caches token shards of an object store (default: in the "
        "system's temporary directory)",
        shows="PATH",
    )
    data_cache_bytes: int | None = _flag(
        "data",
        "bytes",
        "maximum size of --data_cache, shared by all ranks of a node (default: 32 GiB)",
        shows="BYTES",
        minimum=1,
    )
    eval_tokens: int | None = _count(
        "data", "validation tokens per evaluation (default: 1M, or all if fewer)", "TOKENS"
    )

    batch_tokens: int | None = _count(
        "batch",
        "tokens per optimizer step, over all devices (default: from the compute budget)",
        "TOKENS",
        changes_curve=True,
    )
    micro_batch_size: int | None = _count(
        "batch",
        "sequences per device and micro-batch; auto: the largest that fits (default: auto)",
        "SEQUENCES|auto",
        follows=True,
    )
    batch_ramp_start: int | None = _count(
        "batch",
        "batch size ramp: tokens of the first optimizer step",
        "TOKENS",
        changes_curve=True,
    )
    batch_ramp_tokens: int | None = _count(
        "batch",
        "batch size ramp: tokens until the batch reaches --batch_tokens (default: 10%% of the "
        "total)",
        "TOKENS",
        changes_curve=True,
    )

    total_tokens: int | None = _count(
        "budget",
        "tokens to train on (default: 20 per parameter)",
        "TOKENS",
        changes_curve=True,
    )
    learning_rate: float | None = _real("peak learning rate (default: from the compute budget)")
    min_learning_rate: float | None = _real(
        "final learning rate, of a schedule that decays (default: a tenth of the peak)",
        follows=True,
    )
    warmup_tokens: int | None = _count(
        "budget",
        "tokens of the warm-up (default: 1%% of the total)",
        "TOKENS",
        minimum=0,
        changes_curve=True,
    )
    schedule: str | None = _flag(
        "budget",
        "text",
        "learning rate schedule (default: cosine)",
        choices=tuple(SCHEDULES),
        changes_curve=True,
    )
    decay_tokens: int | None = _count(
        "budget",
        f"tokens of the decay, for {WITH_DECAY_TOKENS} (default: 20%% of the total)",
        "TOKENS",
        changes_curve=True,
    )
    weight_decay: float | None = _real("weight decay of matrices (default: 0.1)")
    beta1: float | None = _real("optimizer's beta1 (default: 0.9)", below=1.0)
    beta2: float | None = _real("optimizer's beta2 (default: 0.95; Lion 0.99)", below=1.0)
    ema_tokens: int = _count(
        "budget",
        "keep an exponential moving average of the weights with this half-life, evaluate it beside "
        "them, and save it in checkpoints; 0: off",
        "TOKENS",
        default=0,
        minimum=0,
        changes_curve=True,
        probed=True,
    )

    model_config: str | None = _flag(
        "model", "text", "config.json of a Hugging Face causal language model", shows="PATH"
    )
    init_from: str | None = _flag(
        "model",
        "text",
        "existing weights to start a new run from: a Hugging Face model directory or hub id, or "
        "a run of this project, with --model_config or the config of the source",
        shows="MODEL|RUN[@STEP]",
        changes_curve=True,
        unchangeable="the run began with the weights of the old one",
    )
    init_optimizer: bool = _switch(
        "model",
        "with --init_from RUN: start with the states of that run's optimizer too",
        changes_curve=True,
        unchangeable="the run has begun with the old value",
    )
    gradient_checkpointing: bool | str = _flag(
        "model",
        "recompute",
        "recompute activations in the backward pass, to save memory; selective keeps the "
        "outputs of matmuls and of fused attention (default: off; without a value: full)",
        shows="[full|selective|off]",
        default=False,
    )
    attn_implementation: str = _flag(
        "model",
        "text",
        f"attention kernel: {', '.join(ATTENTION_IMPLEMENTATIONS)}",
        shows="KERNEL",
        default="auto",
        choices=ATTENTION_IMPLEMENTATIONS,
        follows=True,
        probed=True,
    )
    precision: str | None = _flag(
        "model",
        "text",
        'precision of the weights, where the DeepSpeed JSON has "auto" or nothing (default: for '
        "auto bf16, or fp32 on a device that emulates bf16; fp32 if it enables neither bf16 nor "
        "fp16)",
        choices=PRECISIONS,
        probed=True,
    )
    float32_matmul: str = _flag(
        "model",
        "text",
        "precision of float32 matmuls on a GPU; high: TF32, faster, with a 10-bit mantissa",
        default=HIGHEST,
        choices=(HIGHEST, HIGH),
        changes_curve=True,
    )
    fp8: bool = _switch(
        "model",
        "multiply in 8-bit floating point in the linear layers of the blocks while training, with "
        "a scale for each tensor; with --compile",
        changes_curve=True,
        probed=True,
        no_tensor_parallel="DeepSpeed replaces the linear layers",
    )
    compile: bool = _switch(
        "model",
        "compile the model's blocks and the loss with torch.compile",
        probed=True,
    )
    loss_chunk_tokens: int | None = _count(
        "model",
        "compute the loss for this many tokens at a time, to save memory; 0: for all of a "
        "micro-batch (default: 0, or chunks of 512 MiB if its logits exceed 16 GiB in float32)",
        "N",
        minimum=0,
        follows=True,
        probed=True,
        no_tensor_parallel="DeepSpeed replaces the output head",
    )
    qk_clip: float = _flag(
        "model",
        "real",
        "after each step scale down the query and key weights of heads whose largest attention "
        "logit exceeds X; 100 is usual with Muon, 0: off",
        shows="X",
        default=0.0,
        minimum=0.0,
        changes_curve=True,
        probed=True,
    )
    balance_rate: float = _flag(
        "model",
        "real",
        "mixture of experts: after each step raise the routing bias of experts below the mean load "
        "by X, and lower the others'; 0.001 is usual, 0: off",
        shows="X",
        default=0.0,
        minimum=0.0,
        changes_curve=True,
    )
    global_router_loss: bool = _switch(
        "model",
        "mixture of experts: the router loss balances the global batch instead of each micro-batch",
        changes_curve=True,
    )
    router_z_loss: float = _flag(
        "model",
        "real",
        "mixture of experts: weight of the mean squared log-partition of the routers; 0.001 is "
        "usual, 0: off",
        shows="X",
        default=0.0,
        minimum=0.0,
        changes_curve=True,
    )
    z_loss: float = _flag(
        "model",
        "real",
        "weight of the mean squared log-partition of the output logits; 0.0001 or less is usual, "
        "0: off",
        shows="X",
        default=0.0,
        minimum=0.0,
        changes_curve=True,
    )
    seed: int = _flag(
        "model",
        "count",
        "seed of the initial weights and of the data order",
        shows="N",
        default=0,
        minimum=0,
        changes_curve=True,
    )

    run_dir: str | None = _flag(
        "run",
        "text",
        "directory of the run; if it contains a checkpoint, the run resumes from it",
        shows="PATH",
        of_one_run=True,
    )
    deepspeed_config: str | None = _flag("run", "text", "DeepSpeed JSON file", shows="PATH")
    nvme_path: str | None = _flag(
        "run",
        "text",
        "directory on a local NVMe disk of each host, for a profile that offloads to NVMe",
        shows="PATH",
    )
    settings: str | None = _flag(
        "run",
        "text",
        "JSON file with settings, or the run.json of a run; flags take precedence",
        shows="PATH",
        saved=False,
    )
    branch: str | None = _flag(
        "run",
        "text",
        "start from a checkpoint of another run (default: its newest), with that run's settings; "
        "flags take precedence",
        shows="RUN[@STEP]",
        of_one_run=True,
    )
    log_interval: int | None = _count(
        "run", "optimizer steps between metrics (default: from the number of steps)", "STEPS"
    )
    eval_interval: int | None = _count(
        "run", "optimizer steps between evaluations (default: from the number of steps)", "STEPS"
    )
    checkpoint_interval: int | None = _count(
        "run", "optimizer steps between checkpoints (default: from the number of steps)", "STEPS"
    )
    memory_checkpoint_interval: int = _count(
        "run",
        "also copy the states into the memory of each host (/dev/shm) at this interval, from where "
        "the same command resumes after the run was killed; 0: never",
        "STEPS",
        minimum=0,
        default=0,
    )
    async_checkpoint: bool = _switch(
        "run",
        "write checkpoints in the background; with --no-async_checkpoint training waits for each",
        True,
    )
    checkpoint_keep: int = _count("run", "number of newest checkpoints to keep", "N", default=3)
    checkpoint_keep_tokens: int | None = _count(
        "run", "also keep, permanently, one checkpoint per this many tokens", "TOKENS"
    )
    checkpoint_keep_best: int = _count(
        "run",
        "also keep the N checkpoints with the lowest eval/loss",
        "N",
        minimum=0,
        default=0,
    )
    checkpoint_read_back: bool = _switch(
        "run",
        "read each file of a checkpoint from the disk before it counts as written; every resume "
        "compares all checksums",
    )
    checkpoint_failures: int = _count(
        "run",
        "intervals in a row without a successful save after which the run ends",
        "N",
        default=3,
    )
    stop_after: float | None = _flag(
        "run",
        "duration",
        "save and stop with exit code 75 within this time, e.g. 3h50m or 90s",
        shows="DURATION",
        minimum=1.0,
    )
    hang_timeout: float = _flag(
        "run",
        "duration",
        "time without progress after which the run ends and names the rank at fault; three times "
        "that until the first step is done; 0: never",
        shows="DURATION",
        minimum=0.0,
        default=600.0,
    )
    profile: tuple[int, int] | None = _flag(
        "run",
        "steps",
        "record a torch profiler trace of these steps, and on a GPU a memory snapshot",
        shows="FIRST:LAST",
        saved=False,
    )
    upload_to: str | None = _flag(
        "run",
        "text",
        "object store to copy checkpoints to, e.g. s3://bucket/first, or off; a --run_dir "
        "without a checkpoint is restored from it",
        shows="URL",
        of_one_run=True,
    )
    upload_keep: int = _count(
        "run",
        "number of newest checkpoints to keep in the object store; 0: all",
        "N",
        minimum=0,
        default=0,
    )
    upload_wait: float = _flag(
        "run",
        "duration",
        "maximum time to wait for uploads at the end of the run",
        shows="DURATION",
        default=300.0,
        minimum=0.0,
    )
    report_interval: float = _flag(
        "run",
        "duration",
        "time between updates of report.html, which is also written at the end; 0: never",
        shows="DURATION",
        default=180.0,
        minimum=0.0,
    )
    accept_changes: bool = _switch(
        "run",
        "resume even if the data, or settings that shape the loss curve, have changed",
        saved=False,
    )
    check: bool = _switch(
        "run", "check everything, print the plan of the run, and stop", saved=False
    )
    world_size: int | None = _count(
        "run", "with --check: number of devices to plan for", "N", saved=False
    )

    hellaswag: str | None = _flag(
        "evaluation",
        "text",
        "evaluate on HellaSwag, from a JSON lines file or a Hugging Face dataset",
        shows="PATH|ID",
        no_tensor_parallel=OWN_TEXTS,
    )
    hellaswag_items: int = _count(
        "evaluation",
        "use only the first N items of HellaSwag; 0: all",
        "N",
        minimum=0,
        default=1000,
    )
    core: str | None = _flag(
        "evaluation",
        "text",
        "evaluate on CORE, the 22 tasks of DCLM; directory of the unpacked eval_bundle",
        shows="DIR",
        no_tensor_parallel=OWN_TEXTS,
    )
    core_items: int = _count(
        "evaluation",
        "use only N items of each task of CORE; 0: all",
        "N",
        minimum=0,
        default=500,
    )
    eval_tasks: tuple[str, ...] = _flag(
        "evaluation",
        "list",
        "lm-eval tasks to evaluate on (needs pip install 'zerolm[lm-eval]'); may be repeated",
        shows="NAME[,NAME]",
        default=(),
        no_tensor_parallel=OWN_TEXTS,
    )
    eval_task_path: str | None = _flag(
        "evaluation", "text", "directory with additional lm-eval task files (yaml)", shows="PATH"
    )
    eval_task_items: int | None = _count(
        "evaluation", "use only the first N documents of each lm-eval task (default: all)", "N"
    )
    downstream_interval: int | None = _count(
        "evaluation",
        "optimizer steps between evaluations on HellaSwag, CORE and lm-eval tasks (default: "
        "--eval_interval)",
        "STEPS",
        follows=True,
    )
    prompts: str | None = _flag(
        "evaluation",
        "text",
        "prompts to generate samples from: one per line, or .jsonl with a key `prompt`",
        shows="PATH",
        no_tensor_parallel=OWN_TEXTS,
    )
    sample_interval: int | None = _count(
        "evaluation",
        "training tokens between samples (default: each time the tokens have doubled, and at the "
        "end)",
        "TOKENS",
    )
    sample_length: int = _count(
        "evaluation", "maximum new tokens of a sample", "TOKENS", default=64
    )
    temperature: float = _flag(
        "evaluation",
        "real",
        "sampling temperature; 0: always the most likely token",
        shows="X",
        default=0.8,
        minimum=0.0,
    )
    top_k: int = _count(
        "evaluation",
        "sample from the N most likely tokens; 0: from all",
        "N",
        0,
        default=50,
    )
    top_p: float = _flag(
        "evaluation",
        "real",
        "sample from the most likely tokens whose probabilities add up to X; 1: from all",
        shows="X",
        default=1.0,
        minimum=0.0,
    )

    spike_threshold: float = _flag(
        "stability",
        "real",
        "robust z-score above which a loss or gradient norm counts as a spike; 0: never",
        shows="X",
        default=6.0,
        minimum=0.0,
    )
    spike_window: int = _count(
        "stability",
        "window: number of accepted steps used as the baseline, and over which spikes are counted",
        "STEPS",
        default=128,
        minimum=4,
    )
    skip_spikes: bool = _switch(
        "stability",
        "skip the update of a step with a spike; non-finite steps are always skipped",
        True,
    )
    adaptive_clip: float = _flag(
        "stability",
        "real",
        "clip gradient norms more than Z standard deviations above their moving mean (ZClip), in "
        "addition to gradient_clipping; 0: off",
        shows="Z",
        default=0.0,
        minimum=0.0,
        changes_curve=True,
    )
    cooldown_after: int = _count(
        "stability",
        "spikes in the window that start a cooldown, with a lower learning rate; 0: never",
        "N",
        default=3,
        minimum=0,
    )
    cooldown_factor: float = _flag(
        "stability",
        "real",
        "factor on the learning rate during a cooldown",
        shows="X",
        default=0.5,
        minimum=0.0,
        below=1.0,
    )
    cooldown_steps: int = _count("stability", "length of a cooldown", "STEPS", default=100)
    rollback_after: int = _count(
        "stability",
        "spikes in the window that make the run roll back to a checkpoint before them; 0: never",
        "N",
        default=6,
        minimum=0,
    )
    rollback_margin: int | None = _count(
        "stability",
        "number of steps before the first spike whose data is also skipped after a rollback "
        "(default: 1%% of the run, at most 100)",
        "STEPS",
        minimum=0,
    )
    max_rollbacks: int = _count(
        "stability",
        "rollbacks after which the run gives up with exit code 76",
        "N",
        default=5,
        minimum=0,
    )
    max_skips: int = _count(
        "stability",
        "give up if this many of the last 1000 steps were spikes, skipped or not; 0: no limit",
        "N",
        default=30,
        minimum=0,
    )

    corruption_checks: bool = _switch(
        "stability",
        "compare states between steps, and compute a step with odd gradients again before it is "
        "applied, to find what hardware has changed without an error; passes over a batch are "
        "equal in every bit on a CPU, on a GPU as far as its kernels are",
    )
    replay_interval: int = _count(
        "stability",
        "with --corruption_checks: compute the first step of each start twice, and one step of so "
        "many, chosen at random; 0: none",
        "STEPS",
        default=400,
        minimum=0,
    )

    wandb: str = _flag(
        "trackers",
        "text",
        "auto: online if a W&B key is configured, else offline",
        default="auto",
        choices=WANDB_MODES,
        tracker="zerolm.tracking.wandb:WandbTracker",
    )
    wandb_project: str = _flag("trackers", "text", "W&B project", shows="NAME", default="zerolm")
    wandb_entity: str | None = _flag(
        "trackers", "text", "W&B user or team (default: that of the key)", shows="NAME"
    )
    wandb_group: str | None = _flag(
        "trackers", "text", "W&B group (default: the name of the W&B run)", shows="NAME"
    )
    wandb_name: str | None = _flag(
        "trackers",
        "text",
        "name of the W&B run (default: that of --run_dir)",
        shows="NAME",
        of_one_run=True,
    )
    wandb_tags: str | None = _flag("trackers", "text", "tags of the W&B run", shows="A,B")
    tensorboard: bool = _switch(
        "trackers",
        "also write TensorBoard event files",
        tracker="zerolm.tracking.tensorboard:TensorboardTracker",
    )

    local_rank: int = _flag("hidden", "count", "", default=0, minimum=0, saved=False)

    explicit: frozenset[str] = frozenset()  # names chosen by a flag, in a file, or for the trunk
    inherited: frozenset[str] = frozenset()  # names whose values --branch took from another run
    origins: dict[str, str] = field(default_factory=dict)  # `file: key` by name, of values given

    def where(self, name: str) -> str:
        """Return where a setting was given, to start a message: `file: key`."""
        return self.origins.get(name, f"default: --{name}")

    @property
    def rows_differ(self) -> bool:
        """Whether sequences may differ in their number of targets."""
        return self.document_mask or self.packing == BEST_FIT

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
CURVE_SETTINGS = tuple(name for name, about in FLAGS.items() if about["changes_curve"])
TRACKERS: dict[str, str] = {  # {name of a tracker and of its flag: its class}
    name: about["tracker"] for name, about in FLAGS.items() if about["tracker"]
}


def split_weight(source: str) -> tuple[str, float | None]:
    """Split a value of `--data` into path and weight; the weight is None if not given.

    Raises:
        ValueError: the text after the last `=` is not a number.
    """
    path, equals, weight = source.rpartition("=")
    return (path, parse_number(weight)) if equals else (source, None)
