"""The metrics that any run may record in `metrics.jsonl`, and how each is displayed.

Metrics of an optional feature or evaluation are defined in its module in zerolm/features or
zerolm/evaluate. zerolm/parts/metrics.py combines all metrics. Standard library only.
"""

import re
from dataclasses import dataclass

LOWER, HIGHER = "lower", "higher"  # whether a lower or a higher value of a metric is better
AUXILIARY = "train/auxiliary_loss"  # auxiliary loss of the routers
RANK_IMBALANCE = "router/rank_imbalance"  # of tokens over ranks with divided experts
IDLE_SHARE, SLOWEST_IN_PIPELINE = "stages/idle_share", "stages/slowest"  # of a pipeline


@dataclass(frozen=True)
class Panel:
    """A chart of one or several metrics with common axes and a common unit.

    Attributes:
        about: explanation for the reader, shown below the chart.
        many: whether the chart has one curve per source or block; if so, it is omitted when several
            runs are compared.
        ordered: whether the curves belong to consecutive blocks, so their colours follow the order.
        smooth: whether the curve is so noisy that a smoothed curve is drawn over it.
        points: whether there are so few values that each one is marked.
        log: whether the y-axis is logarithmic.
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
    """A metric, or a family of metrics with one per source, block or task.

    Attributes:
        key: key in `metrics.jsonl`, where placeholders such as `<source>` stand for any text.
        unit: "" if the metric has none. "bytes", "tokens", "tokens/s", "share", "s" and "steps" set
            the number format in the report. Any other unit is only printed, but the axis for "nats
            per token" never starts at zero.
        panel: chart that shows the metric; None if another curve shows the same quantity in another
            unit.
        about: description in docs/metrics.md.
        line: format in the console line, as `key=value`; `{count}` prints numbers like 12.3k.
        bar: format in the progress bar.
        bar_rank: priority in a narrow terminal, which shows only the figures with the lowest ranks.
        pattern: regular expression for the keys, if `key` alone would match too many.
        better: `LOWER` or `HIGHER`; "" if neither is better, so that no value is marked as best.
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
        """Return whether a key in `metrics.jsonl` belongs to this metric."""
        pattern = self.pattern or re.sub(r"<\w+>", ".+", re.escape(self.key))
        return re.fullmatch(pattern, key) is not None


# fmt: off
LOSS = Panel("Loss", smooth=True,
    about="Mean cross-entropy of a step's global batch. Marks are evaluations on held-out text. "
        "Steps undone by a rollback are drawn faintly.")
BITS_PER_BYTE = Panel("Bits per byte", smooth=True,
    about="Sum of the losses of text tokens, in bits, divided by the bytes of that text: "
        "comparable across tokenizers. Marks are evaluations on held-out text.")
GRADIENT_NORM = Panel("Gradient norm", smooth=True, log=True,
    about="2-norm before clipping. Above the dashed line the gradient is clipped.")
NOISE_SCALE = Panel("Gradient noise scale", smooth=True, log=True,
    about="Above this batch size, more tokens per step help little (McCandlish et al., 2018). "
        "Drawn together with the actual batch size.")
BATCH = Panel("Batch")  # for a run that does not measure its noise scale
Z_LOSS = Panel("Z-loss", smooth=True,
    about="Weighted mean of the squared log-sum-exp of the logits.")
STEP_TIME = Panel("Step time", smooth=True, log=True,
    about="Time per optimizer step; compute time of the slowest rank, and the mean over ranks; and "
        "time spent waiting for data.")
MEMORY = Panel("Memory", about="On rank 0's device; on a CPU, of rank 0's process.")
HOST_MEMORY = Panel("Host memory", about="In use on rank 0's host, by all processes.")
POWER = Panel("Power", about="Power draw of rank 0's GPU, measured by its driver.")
CHECKPOINTS = Panel("Checkpoints", points=True,
    about="How long training was paused for a checkpoint: to copy the states, and to wait for the "
        "previous checkpoint.")
REFUSED_STEPS = Panel("Refused steps", about="Since the run started.")

# Sections, metrics and panels are shown in this order.
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Loss": (
        Metric("train/loss", "nats per token", LOSS, line="loss={:.4f}", bar="loss {:.4f}",
            bar_rank=1,
            about="mean cross-entropy of the target tokens in the last step's global batch, over "
                "all ranks and micro-batches, summed in float64", better=LOWER),
        Metric("train/perplexity", "", None, "`exp(train/loss)`", better=LOWER),
        Metric("train/bits_per_byte", "bits per byte", BITS_PER_BYTE,
            "sum of the losses of the last step's text tokens, in bits, divided by the UTF-8 "
            "bytes of that text (see below); absent if the tokenizer is unknown",
            better=LOWER),
        Metric("data/<source>/loss", "nats per token",
            Panel("Loss by source", many=True, smooth=True,
                about="Training loss of each source's tokens in the step's batch."),
            "mean over the tokens of one source in the last step's batch", better=LOWER),
        Metric("data/<source>/bits_per_byte", "bits per byte",
            Panel("Bits per byte by source", many=True, smooth=True,
                about="For each source's tokens in the step's batch."),
            "`train/bits_per_byte` of one source's tokens in the last step's batch", better=LOWER),
    ),
    "Evaluation": (),
    "Optimization": (
        Metric("train/learning_rate", "", Panel("Learning rate"), line="lr={:.3e}", bar="lr {:.2e}",
            bar_rank=5, about="learning rate of the last step"),
        Metric("train/grad_norm", "", GRADIENT_NORM, line="grad_norm={:.3f}", bar="grad {:.3g}",
            bar_rank=4, about="2-norm of the gradient before clipping"),
    ),
    "Routers": (
        Metric(AUXILIARY, "nats", Panel("Router loss", smooth=True),
            "router loss of a mixture of experts, weighted as the model config sets; mean over "
            "the micro-batches of all ranks; not included in `train/loss`"),
    ),
    "Speed": (
        Metric("throughput/tokens_per_second", "tokens/s", Panel("Throughput", smooth=True),
            line="tok/s={count}", bar="{count} tok/s", bar_rank=2,
            about="training speed since the previous line, excluding time for checkpoints and "
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
            "mean time per optimizer step since the previous line", better=LOWER),
        Metric("throughput/slowest_rank", "rank", None,
            "rank with the longest own time per step (see the next row) since the previous line; "
            "absent on one rank"),
        Metric("throughput/slowest_rank_seconds", "s", STEP_TIME,
            "time per step that this rank spends waiting for data and in forward passes; in the "
            "rest of a step ranks wait for each other. Under ZeRO-3 forward passes gather "
            "weights, so a slow rank delays all ranks there, and only its data time stands out"),
        Metric("throughput/mean_rank_seconds", "s", STEP_TIME,
            "the same as a mean over the ranks; if the slowest rank is far above it, check that "
            "rank's host"),
        Metric("throughput/slowest_host_ratio", "", None,
            "own time of the slowest host's slowest rank, relative to the median of the other "
            "hosts; absent on one host. A ratio above 1.1 for three minutes is logged as an event"),
        Metric("throughput/data_seconds", "s", STEP_TIME,
            "part of `throughput/step_seconds` spent waiting for data", better=LOWER),
        Metric("memory/allocated_bytes", "bytes", MEMORY,
            "allocated memory on rank 0's device; on a CPU, resident memory of rank 0's process"),
        Metric("memory/peak_bytes", "bytes", MEMORY, "largest `memory/allocated_bytes` so far"),
        Metric("memory/host_bytes", "bytes", HOST_MEMORY,
            "memory in use on rank 0's host, by all processes: total minus available"),
        Metric("power/watts", "W", POWER,
            "power draw of rank 0's GPU, measured by its driver, on most GPUs over the last "
            "second; absent on CPUs, with MIG, and without the package `nvidia-ml-py`"),
    ),
    "Data": (
        Metric("data/<source>/epochs", "epochs", Panel("Epochs by source", many=True),
            "epochs over a source since the run started"),
        Metric("data/<source>/tokens", "tokens", None,
            "tokens read from a source since the run started"),
        Metric("data/stage", "", Panel("Data blend"),
            "with `--data_stage` or `--over_max_epochs redistribute`: the current data blend, "
            "numbered from 1, at the last sequence of the step"),
        Metric("data/store_bytes", "bytes",
            Panel("Read from the store",
                about="By rank 0 and its loader workers since the run last started."),
            "with shards in an object store: bytes that rank 0 and its loader workers have read "
            "from it since the run last started or rolled back"),
        Metric("data/store_repeats", "requests", Panel("Retried requests"),
            "requests to the store that were retried because the store failed or returned "
            "damaged data"),
        Metric("data/cache_hits", "share",
            Panel("Cache hits",
                about="Share of requested blocks that were in the node's cache; the others were "
                    "downloaded."),
            "share of requested blocks that were in the node's cache; the others were downloaded"),
    ),
    "Checkpoints": (
        Metric("checkpoint/stall_seconds", "s", CHECKPOINTS,
            "how long training was paused for a checkpoint", better=LOWER),
        Metric("checkpoint/copy_seconds", "s", CHECKPOINTS,
            "part of the pause spent copying states to host memory", better=LOWER),
        Metric("checkpoint/wait_seconds", "s", CHECKPOINTS,
            "part of the pause spent waiting for the previous checkpoint, which was still being "
            "written; if it is long, save less often or to a faster disk", better=LOWER),
    ),
    "Health": (
        Metric("health/skipped_steps", "steps", REFUSED_STEPS,
            "steps since the run started that were not applied: refused because of a spike, or "
            "skipped by DeepSpeed because of an overflow"),
        Metric("health/spikes", "steps", REFUSED_STEPS,
            "steps with a spike since the run started, across all restarts and rollbacks"),
        Metric("health/rollbacks", "rollbacks", REFUSED_STEPS,
            "number of automatic rollbacks to a checkpoint"),
    ),
}
# fmt: on
