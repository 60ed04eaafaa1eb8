"""Which metrics are drawn together, in which order, and what to say of them. Pure.

A metric that nothing here knows is drawn all the same, by itself, after the others.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TRAIN_LOSS = "train/loss"


@dataclass(frozen=True)
class Panel:
    """Curves over one axis.

    Attributes:
        unit: of the values: "", "s", "bytes", "tokens", "share" or any other word.
        pattern: a regular expression for the whole key of a metric.
        about: what a reader should know.
        many: one curve a source or a block: left out where several runs are compared.
        smooth: noise is in it that hides the curve.
        points: values are few: each is a mark.
    """

    title: str
    unit: str
    pattern: str
    about: str = ""
    many: bool = False
    smooth: bool = False
    points: bool = False
    log: bool = False


PANELS = (
    Panel(
        "Loss", "nats per token", r"train/loss|eval/loss", smooth=True,
        about="Mean cross-entropy of a step's batch; marks are evaluations on held-out text. "
        "Stretches that a rollback went back over are drawn faintly.",
    ),
    Panel(
        "Loss by source", "nats per token", r"data/.+/loss", many=True, smooth=True,
        about="Training loss of each source's tokens in the step's batch.",
    ),
    Panel(
        "Evaluation by source", "nats per token", r"eval/.+/loss", many=True, points=True,
    ),
    Panel(
        "Tasks", "share", r"eval/.+/(acc|acc_norm|exact_match|f1|mc1|mc2)(_\w+)?", points=True,
        about="Accuracy on downstream tasks, as lm-eval defines it.",
    ),
    Panel("Learning rate", "", r"train/learning_rate"),
    Panel(
        "Gradient norm", "", r"train/(grad_norm|clip_norm)", smooth=True, log=True,
        about="2-norm before clipping. Above the dashed line the gradient is clipped.",
    ),
    Panel(
        "Clipped steps", "share", r"train/clipped_share", smooth=True,
        about="Of the steps since the line before.",
    ),
    Panel("Parameter norm", "", r"train/param_norm", about="2-norm of all weights."),
    Panel(
        "Parameter norm by block", "", r"train/param_norm/.+", many=True,
        about="Of the weights of each block, from the first (blue) to the last (yellow).",
    ),
    Panel(
        "Update ratio", "", r"train/update_ratio", log=True,
        about="Norm of a step's change over norm of the weights; around 0.001 is usual.",
    ),
    Panel("Update ratio by block", "", r"train/update_ratio/.+", many=True, log=True),
    Panel(
        "Gradient noise scale", "tokens", r"train/(noise_scale_tokens|batch_tokens)", smooth=True,
        log=True,
        about="The batch above which more tokens a step bring little (McCandlish et al., 2018), "
        "beside the batch that it is.",
    ),
    Panel("Router loss", "nats", r"train/auxiliary_loss", smooth=True),
    Panel(
        "Router balance", "", r"router/load_imbalance", smooth=True,
        about="Tokens of the busiest expert over those of the mean one, mean over the routers; 1 "
        "is balanced.",
    ),
    Panel(
        "Balance by router", "", r"router/load_imbalance/.+", many=True, smooth=True,
        about="Of each router, from the first (blue) to the last (yellow).",
    ),
    Panel(
        "Router choice", "share", r"router/(entropy|unused_experts)", smooth=True,
        about="Entropy of what routers give, of that of an even choice; and experts that no token "
        "of the step went to.",
    ),
    Panel("Throughput", "tokens/s", r"throughput/tokens_per_second", smooth=True),
    Panel(
        "MFU", "share", r"throughput/mfu", smooth=True,
        about="Floating-point operations that the model needs, over the peak of the devices.",
    ),
    Panel(
        "Step time", "s",
        r"throughput/(step_seconds|slowest_rank_seconds|mean_rank_seconds|data_seconds)",
        smooth=True, log=True,
        about="Of an optimizer step; of it, waiting for data; and what the slowest and the mean "
        "rank work by themselves.",
    ),
    Panel("Memory", "bytes", r"memory/\w+", about="Of the first rank's device, or its process."),
    Panel("Epochs by source", "epochs", r"data/.+/epochs", many=True),
    Panel("Stage of the mixture", "", r"data/stage"),
    Panel(
        "Read from the store", "bytes", r"data/store_bytes",
        about="By the first rank and its loader workers, since the run last started.",
    ),
    Panel("Repeated requests", "requests", r"data/store_repeats"),
    Panel(
        "Blocks found in the cache", "share", r"data/cache_hits",
        about="Of the blocks that were needed; the others were fetched.",
    ),
    Panel(
        "Checkpoints", "s", r"checkpoint/(stall_seconds|copy_seconds|wait_seconds)", points=True,
        about="How long training stood still for a checkpoint: for the copy, and for the one "
        "before it.",
    ),
    Panel(
        "Refused steps", "steps", r"health/(skipped_steps|spikes|rollbacks)",
        about="Since the run began.",
    ),
)  # fmt: skip
# The same as another curve, in another unit.
LEFT_OUT = re.compile(
    r"data/.+/tokens|(train|eval)/perplexity|eval/.+/items|throughput/(samples_per_second|slowest_rank|"
    r"tokens_per_second_per_device)|eval/.+_stderr"
)


def panels(keys: Collection[str], *, compared: bool) -> list[dict[str, Any]]:
    """Return the panels that have something to draw, each with its `keys`.

    Args:
        keys: of all metrics.
        compared: several runs are drawn, a colour a run.
    """
    left = {key for key in keys if not LEFT_OUT.fullmatch(key)}
    drawn = []
    for panel in PANELS:
        chosen = sorted(
            (key for key in left if re.fullmatch(panel.pattern, key)),
            key=lambda key: (
                panel.pattern.find(key),
                panel.pattern.find(key.rpartition("/")[2]),
                _by_number(key),
            ),
        )
        left -= set(chosen)
        if panel.title == "Gradient noise scale" and "train/noise_scale_tokens" not in chosen:
            panel = Panel("Batch", "tokens", panel.pattern)
        if chosen and not (compared and panel.many and len(chosen) > 4):
            drawn.append(_shown(panel, chosen))
    return drawn + [_shown(Panel(key, "", key), [key]) for key in sorted(left)]


def _shown(panel: Panel, keys: Sequence[str]) -> dict[str, Any]:
    about = asdict(panel)
    del about["pattern"]
    return {**about, "keys": list(keys), "names": _short(keys)}


def _short(keys: Sequence[str]) -> list[str]:
    """Return the part of each key that differs from the others."""
    if len(keys) == 1:
        return [keys[0]]
    parts = [key.split("/") for key in keys]
    if any(len(part) != len(parts[0]) for part in parts):
        return list(keys)
    different = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    return ["/".join(word for word, show in zip(part, different, strict=True) if show)
            for part in parts]  # fmt: skip


def _by_number(key: str) -> list[Any]:
    """Sort layers.2 before layers.10."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", key)]
