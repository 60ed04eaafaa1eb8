"""The metrics that every run may have: the contents of `metrics.jsonl`, and how each is shown.

Those of a part that may be off are in its module of zerolm/features or zerolm/evaluate. The table
of all is in zerolm/parts/metrics.py. Standard library only.
"""

import re
from dataclasses import dataclass

LOWER, HIGHER = "lower", "higher"  # which value of a metric is better


@dataclass(frozen=True)
class Panel:
    """A chart of one or several metrics, which share its axes and its unit.

    Attributes:
        about: what a reader needs to know; shown below the chart.
        many: one curve per source or block; left out where several runs are compared.
        ordered: the curves are of consecutive blocks; coloured from the first to the last.
        smooth: noise hides the curve, so a smoothed curve is drawn over it.
        points: there are few values, so each one is marked.
        log: the y-axis is logarithmic.
    """

    title: str
    about: str = ""
    many: bool = False
    ordered: bool = False
    smooth: bool = False
    points: bool = False
    log: bool = False


@dataclass(frozen=True)
class Metric:
    """One metric, or one for each source, block or task.

    Attributes:
        key: its key in `metrics.jsonl`; `<source>` and the like stand for any text.
        unit: "" if it has none. "bytes", "tokens", "tokens/s", "share", "s" and "steps" set the
            number format of the report; any other unit is only printed,
            but the axis of "nats per token" never starts at zero.
        panel: None if it is not drawn: another curve shows the same in another unit.
        about: its line in docs/metrics.md.
        line: how the console line prints it, as `key=value`; `{count}` is short for 12.3k.
        bar: how the progress bar prints it.
        bar_rank: a terminal too narrow for all figures shows those of the lowest ranks.
        pattern: regular expression of the keys, where `key` alone would match too many.
        better: `LOWER` or `HIGHER`; "" if neither is, and no value is marked as the best one.
    """

    key: str
    unit: str
    panel: Panel | None
    about: str
    line: str = ""
    bar: str = ""
    bar_rank: int = 99
    pattern: str = ""
    better: str = ""

    def matches(self, key: str) -> bool:
        """Return whether a key of `metrics.jsonl` is of this metric."""
        pattern = self.pattern or re.sub(r"<\w+>", ".+", re.escape(self.key))
        return re.fullmatch(pattern, key) is not None


# fmt: off
LOSS = Panel("Loss", smooth=True,
    about="Mean cross-entropy of a step's global batch. Marks are evaluations on held-out text. "
        "Steps that were undone by a rollback are drawn faintly.")
BITS_PER_BYTE = Panel("Bits per byte", smooth=True,
    about="Losses of the tokens that stand for text, in bits, divided by the bytes of that text: "
        "comparable across tokenizers. Marks are evaluations on held-out text.")
GRADIENT_NORM = Panel("Gradient norm", smooth=True, log=True,
    about="2-norm before clipping. Above the dashed line the gradient is clipped.")
NOISE_SCALE = Panel("Gradient noise scale", smooth=True, log=True,
    about="Above this batch size more tokens per step help little (McCandlish et al., 2018). Drawn "
        "with the actual batch size.")
BATCH = Panel("Batch")  # of a run that does not measure its noise scale
Z_LOSS = Panel("Z-loss", smooth=True,
    about="Weighted mean of the squared logarithm of the sum of exponentials of logits.")
STEP_TIME = Panel("Step time", smooth=True, log=True,
    about="Time of an optimizer step; the compute time of the slowest rank, and its mean over the "
        "ranks; and the time spent waiting for data.")
MEMORY = Panel("Memory", about="On the device of rank 0; on a CPU, of its process.")
HOST_MEMORY = Panel("Host memory", about="In use on the host of rank 0, by all of its processes.")
POWER = Panel("Power", about="Draw of rank 0's GPU, as its driver measures it.")
CHECKPOINTS = Panel("Checkpoints", points=True,
    about="How long training was paused for a checkpoint: to copy the states, and to wait for the "
        "previous checkpoint.")
REFUSED_STEPS = Panel("Refused steps", about="Since the run began.")

# Sections, metrics and panels are shown in this order.
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Loss": (
        Metric("train/loss", "nats per token", LOSS, line="loss={:.4f}", bar="loss {:.4f}",
            bar_rank=1,
            about="mean cross-entropy of the target tokens of the last step's global batch, over "
                "all ranks and micro-batches, summed in float64", better=LOWER),
        Metric("train/perplexity", "", None, "`exp(train/loss)`", better=LOWER),
        Metric("train/bits_per_byte", "bits per byte", BITS_PER_BYTE,
            "losses of the last step's target tokens that stand for text, in bits, divided by the "
            "UTF-8 bytes of that text (see below); absent if the tokenizer is not known",
            better=LOWER),
        Metric("data/<source>/loss", "nats per token",
            Panel("Loss by source", many=True, smooth=True,
                about="Training loss of each source's tokens in the step's batch."),
            "mean over the tokens of one source in the last step's batch", better=LOWER),
        Metric("data/<source>/bits_per_byte", "bits per byte",
            Panel("Bits per byte by source", many=True, smooth=True,
                about="Of each source's tokens in the step's batch."),
            "`train/bits_per_byte` of one source's tokens in the last step's batch", better=LOWER),
    ),
    "Evaluation": (),
    "Optimization": (
        Metric("train/learning_rate", "", Panel("Learning rate"), line="lr={:.3e}", bar="lr {:.2e}",
            bar_rank=5, about="learning rate of the last step"),
        Metric("train/grad_norm", "", GRADIENT_NORM, line="grad_norm={:.3f}", bar="grad {:.3g}",
            bar_rank=4, about="2-norm of the gradient before clipping"),
        Metric("train/clipped_share", "share",
            Panel("Clipped steps", smooth=True,
                about="Share of the steps since the previous line."),
            "share of the steps since the previous line whose gradient was clipped; absent without "
            "`gradient_clipping`"),
        Metric("train/param_norm", "", Panel("Parameter norm", about="2-norm of all weights."),
            "2-norm of all parameters; absent if they are on NVMe"),
        Metric("train/param_norm/<block>", "",
            Panel("Parameter norm by block", many=True, ordered=True,
                about="2-norm of the weights of each block, from the first (blue) to the last "
                    "(yellow)."),
            "the same for one block: each decoder layer (`layers.3`), the embeddings, the last "
            "norm, the head. A tied head counts as the embeddings"),
        Metric("train/update_ratio", "",
            Panel("Update ratio", log=True,
                about="Norm of a step's update of the weights, divided by the norm of the weights; "
                    "around 0.001 is usual."),
            "norm of the last step's update of the float32 master weights, divided by the norm of "
            "the parameters; about 1e-3 is usual. Absent for a step that was not applied"),
        Metric("train/update_ratio/<block>", "",
            Panel("Update ratio by block", many=True, ordered=True, log=True),
            "the same for one block"),
        Metric("train/noise_scale_tokens", "tokens", NOISE_SCALE,
            "gradient noise scale: the batch size at which the gradient is as much noise as signal "
            "(see below)"),
        Metric("train/batch_tokens", "tokens", NOISE_SCALE,
            "tokens in the last step's batch, over all ranks"),
    ),
    "Routers": (
        Metric("train/auxiliary_loss", "nats", Panel("Router loss", smooth=True),
            "router loss of a mixture of experts, weighted as in the model's config; mean over the "
            "micro-batches of all ranks; not included in `train/loss`"),
    ),
    "Speed": (
        Metric("throughput/tokens_per_second", "tokens/s", Panel("Throughput", smooth=True),
            line="tok/s={count}", bar="{count} tok/s", bar_rank=2,
            about="training speed since the previous line, without the time for checkpoints and "
                "evaluations", better=HIGHER),
        Metric("throughput/tokens_per_second_per_device", "tokens/s", None, "the same, per device",
            better=HIGHER),
        Metric("throughput/samples_per_second", "sequences/s", None, "the same, in sequences",
            better=HIGHER),
        Metric("throughput/mfu", "share",
            Panel("MFU", smooth=True,
                about="Model FLOPs utilization: FLOP/s that the model needs, divided by the peak "
                    "FLOP/s of the devices."),
            "model FLOPs utilization: FLOP/s that the model needs, divided by the peak FLOP/s of "
            "the devices (see below)", line="mfu={:.1%}", bar="MFU {:.1%}", bar_rank=3,
            better=HIGHER),
        Metric("throughput/step_seconds", "s", STEP_TIME,
            "mean time of an optimizer step since the previous line", better=LOWER),
        Metric("throughput/slowest_rank", "rank", None,
            "rank with the longest time of its own per step since the previous line: that of the "
            "next row; absent on one rank"),
        Metric("throughput/slowest_rank_seconds", "s", STEP_TIME,
            "time per step in which that rank waits for data or runs forward passes; in the rest "
            "of a step ranks wait for each other. Under ZeRO-3 the forward passes gather weights, "
            "so a slow rank delays all ranks there, and only its data time stands out"),
        Metric("throughput/mean_rank_seconds", "s", STEP_TIME,
            "the same, mean over the ranks: if the slowest rank is far above it, check that "
            "rank's host"),
        Metric("throughput/slowest_host_ratio", "", None,
            "the time of its own of the slowest host's slowest rank, relative to the median of the "
            "other hosts; absent on one host. Above 1.1 for three minutes it is an event"),
        Metric("throughput/data_seconds", "s", STEP_TIME,
            "part of `throughput/step_seconds` spent waiting for data", better=LOWER),
        Metric("memory/allocated_bytes", "bytes", MEMORY,
            "allocated memory on the device of rank 0; on a CPU, resident memory of its process"),
        Metric("memory/peak_bytes", "bytes", MEMORY, "largest `memory/allocated_bytes` so far"),
        Metric("memory/host_bytes", "bytes", HOST_MEMORY,
            "memory in use on the host of rank 0, by all processes: total less available"),
        Metric("power/watts", "W", POWER,
            "power draw of rank 0's GPU, as its driver measures it, on most GPUs over the last "
            "second; absent on CPUs, with MIG, and without the package `nvidia-ml-py`"),
    ),
    "Data": (
        Metric("data/<source>/epochs", "epochs", Panel("Epochs by source", many=True),
            "epochs over a source, since the run began"),
        Metric("data/<source>/tokens", "tokens", None,
            "tokens read from a source, since the run began"),
        Metric("data/stage", "", Panel("Stage of the mixture"),
            "with `--data_stage` or `--over_max_epochs redistribute`: the mixture's current stage, "
            "from 1, judged by the last sequence"),
        Metric("data/store_bytes", "bytes",
            Panel("Read from the store",
                about="By rank 0 and its loader workers, since the run last started."),
            "with shards in an object store: bytes that rank 0 and its loader workers have read "
            "from it since the run last started or rolled back"),
        Metric("data/store_repeats", "requests", Panel("Retried requests"),
            "requests to the store that were retried, because it failed or returned damaged data"),
        Metric("data/cache_hits", "share",
            Panel("Cache hits",
                about="Share of the requested blocks that were in the node's cache; the others "
                    "were downloaded."),
            "share of the requested blocks that were in the node's cache; the others were "
            "downloaded"),
    ),
    "Checkpoints": (
        Metric("checkpoint/stall_seconds", "s", CHECKPOINTS,
            "how long training was paused for a checkpoint", better=LOWER),
        Metric("checkpoint/copy_seconds", "s", CHECKPOINTS,
            "part of the pause spent copying states to host memory", better=LOWER),
        Metric("checkpoint/wait_seconds", "s", CHECKPOINTS,
            "part of the pause spent waiting for the previous checkpoint, which was still being "
            "written; if it is long, save less often, or to a faster disk", better=LOWER),
    ),
    "Health": (
        Metric("health/skipped_steps", "steps", REFUSED_STEPS,
            "steps that were not applied since the run began: refused because of a spike, or "
            "skipped by DeepSpeed because of an overflow"),
        Metric("health/spikes", "steps", REFUSED_STEPS,
            "steps with a spike since the run began, over all restarts and rollbacks"),
        Metric("health/rollbacks", "rollbacks", REFUSED_STEPS,
            "number of automatic rollbacks to a checkpoint"),
    ),
}
# fmt: on
