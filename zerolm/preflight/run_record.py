"""Whether a command may go on with a run: run.json against what the command says. Pure.

What decides the curve must be the same as when the run began. What decides memory and speed may
change: micro-batch, workers, intervals, ZeRO profile. Under a router's loss the cut of the batch
into micro-batches is a part of the curve. With --accept_changes a run goes on with other settings
of its curve too, as far as its states can be carried over, and `carried` says where it then is in
the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerolm.checkpoint_directory import Progress
from zerolm.ds_config import block, compute_precision, precision
from zerolm.mixture import recorded_stages, same_until, stages_shown
from zerolm.order import Stage
from zerolm.settings import CONCAT, HIGHEST, Settings, split_weight
from zerolm.skipped import reached
from zerolm.values import shown

CURVE_SETTINGS = (
    "seed",
    "seq_len",
    "document_mask",
    "packing",
    "batch_tokens",
    "batch_ramp_start",
    "batch_ramp_tokens",
    "total_tokens",
    "schedule",
    "learning_rate",
    "min_learning_rate",
    "warmup_tokens",
    "decay_tokens",
    "weight_decay",
    "beta1",
    "beta2",
    "float32_matmul",
    "adaptive_clip",
)
# What runs had that were begun before there was a choice.
ONCE = {"packing": CONCAT, "float32_matmul": HIGHEST, "adaptive_clip": 0.0}
# Written by transformers, without effect on what is learned.
CASUAL_MODEL_KEYS = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache"}
)
CASUAL_OPTIMIZER_KEYS = frozenset(
    {
        "lr",
        "betas",
        "weight_decay",
        "torch_adam",
        "adam_w_mode",
        "foreach",
        "fused",
        "bias_correction",
    }
)
# What cannot be carried over even if it is wanted, by the beginning of the key, and why.
KEPT = {
    "model_config.": "the checkpoints hold the weights of the model that it was",
    "ds_config precision": "the optimizer's states are those of weights in that precision",
    "ds_config.optimizer.type": "another optimizer's states mean something else",
    "ds_config.optimizer.params.amsgrad": "it would lack one of its states",
    "ds_config.optimizer.params.fp32_optimizer_states": "the states are kept in that precision",
    "ds_config.scheduler": "its place in its schedule means nothing in another one",
}


@dataclass(frozen=True)
class Difference:
    """Something that shapes the curve, and is not as it was.

    Attributes:
        where: the new value is from.
    """

    key: str
    old: Any
    new: Any
    where: str

    @property
    def kept_because(self) -> str:
        """Why it cannot be carried over; empty when it can."""
        return next((why for start, why in KEPT.items() if self.key.startswith(start)), "")

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


def problems(found: Sequence[Difference], path: str, *, accepted: bool) -> list[str]:
    """Return a line for each difference that is not gone on with.

    Args:
        path: of run.json.
        accepted: the command has --accept_changes.
    """
    lines = []
    for one in found:
        line = f"{path}: {one} ({one.where})"
        if one.kept_because:
            lines.append(
                f"{line}, cannot be carried over: {one.kept_because}. Give the old value to go on "
                f"with the run, or choose another --run_dir."
            )
        elif not accepted:
            lines.append(
                f"{line}. Give the old value to go on with the run, or choose another --run_dir, "
                f"or add --accept_changes to go on with the new one."
            )
    return lines


def order_of(plan: Any) -> dict[str, Any]:
    """Return what the order of the data depends on, for a checkpoint's manifest.

    Args:
        plan: what preflight decided.
    """
    order = {
        "seq_len": plan.settings.seq_len,
        "packing": plan.settings.packing,
        "seed": plan.settings.seed,
        "weights": [float(weight) for weight in plan.weights],
        "data_fingerprint": plan.data_fingerprint,
    }
    later = [[stage.start, list(stage.weights)] for stage in plan.mixture.stages[1:]]
    return {**order, "stages": later} if later else order


def _stages_of(order: Mapping[str, Any]) -> list[Stage]:
    """Return the stages of what `order_of` returned."""
    return recorded_stages([[0, order["weights"]], *order.get("stages", [])])


def carried(progress: Progress, old: Mapping[str, Any], new: Mapping[str, Any]) -> Progress:
    """Return a checkpoint's progress as it is in the order of this run.

    The position stays, in tokens: with another `seq_len` it is rounded up to a whole sequence. In
    another order the numbers of sequences mean other text, so windows to leave out are forgotten,
    and so is what losses used to be. A stage that has not begun yet may be another one.

    Args:
        old, new: `order_of` the checkpoint and of this run.
    """
    old, new = {**ONCE, **old}, {**ONCE, **new}
    begun = reached(progress.position, progress.skipped_windows)
    alike = all(_same(old[key], new[key]) for key in new if key not in ("weights", "stages"))
    if alike and same_until(_stages_of(old), _stages_of(new), max(1, begun)):
        return progress
    position = -(-progress.position * old["seq_len"] // new["seq_len"])
    return replace(progress, position=position, skipped_windows=[], history={})


def differences(
    record: Mapping[str, Any],
    settings: Settings,
    *,
    model_config: Mapping[str, Any],
    ds_config: Mapping[str, Any],
    data_fingerprint: str,
    stages: Sequence[Stage],
    begun: int,
    world_size: int,
    router_loss: bool,
) -> list[Difference]:
    """Compare a run's record with what a command asks for, both resolved.

    Args:
        record: the content of run.json.
        model_config: as `to_diff_dict()` gives it.
        stages: of the mixture.
        begun: sequence number below which the run has consumed or left out its data.
        router_loss: the loss depends on how the batch is cut into micro-batches.

    Returns:
        Each thing that would change the curve.
    """
    old_settings = block(record, "settings")
    pairs: list[tuple[str, Any, Any, str]] = []
    for name in CURVE_SETTINGS:
        constant = settings.schedule == old_settings.get("schedule") == "constant"
        if constant and name == "total_tokens":
            continue  # a constant rate does not look ahead: the run may be made longer
        old, new = old_settings.get(name, ONCE.get(name)), getattr(settings, name)
        where = settings.where(name)
        if name == "total_tokens":
            where += f"; a {settings.schedule} schedule looks ahead to it, a constant one would not"
        pairs.append((f"settings.{name}", old, new, where))
    old_data = old_settings.get("data") or []
    pairs.append(
        ("settings.data", _weights(old_data), _weights(settings.data), settings.where("data"))
    )
    if pairs[-1][1] == pairs[-1][2] and settings.seq_len == old_settings.get("seq_len"):
        pairs.append(_stage_pair(record, settings, stages, begun))
    old_print = record.get("data_fingerprint")
    pairs.append(("data_fingerprint", old_print, data_fingerprint, "other tokens in --data"))
    if router_loss:
        old, new = old_settings.get("micro_batch_size"), settings.micro_batch_size
        pairs.append(("settings.micro_batch_size", old, new, "output_router_logits"))
        pairs.append(("world_size", record.get("world_size"), world_size, "output_router_logits"))
    pairs += _model_pairs(block(record, "model_config"), model_config)
    pairs += _ds_pairs(block(record, "ds_config"), ds_config)
    return [Difference(*pair) for pair in pairs if not _same(pair[1], pair[2])]


def _stage_pair(
    record: Mapping[str, Any], settings: Settings, new: Sequence[Stage], begun: int
) -> tuple[str, Any, Any, str]:
    """Compare the stages that have begun; a record from before there were any has one."""
    recorded = block(record, "mixture").get("stages")
    old = recorded_stages(recorded) if recorded else list(new[:1])
    where = next(
        (
            settings.where(name)
            for name in ("data_stage", "max_epochs", "mixture_temperature")
            if name in settings.explicit
        ),
        settings.where("data"),
    )
    if same_until(old, new, begun):
        return ("mixture", None, None, where)
    return ("mixture", stages_shown(old), stages_shown(new), where)


def _weights(sources: Any) -> list[float | None]:
    """Return the weights as shares of 1; None where they follow the sizes of the sources."""
    weights = []
    for source in sources:
        try:
            weights.append(split_weight(source)[1])
        except ValueError:
            weights.append(None)
    if any(weight is None for weight in weights):
        return [None] * len(weights)
    total = sum(weight for weight in weights if weight is not None)
    return [round(weight / total, 12) for weight in weights if weight is not None]


def _model_pairs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any, str]]:
    keys = sorted((set(old) | set(new)) - CASUAL_MODEL_KEYS)
    return [(f"model_config.{key}", old.get(key), new.get(key), "--model_config") for key in keys]


def _ds_pairs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any, str]]:
    where = "--deepspeed_config"
    pairs: list[tuple[str, Any, Any, str]] = [
        ("ds_config precision", precision(old), precision(new), where),
        ("ds_config arithmetic", compute_precision(old), compute_precision(new), where),
    ]
    for path in (
        ("gradient_clipping",),
        ("data_types", "grad_accum_dtype"),
        ("optimizer", "type"),
        ("scheduler",),
    ):
        old_value, new_value = (block(ds, *path[:-1]).get(path[-1]) for ds in (old, new))
        pairs.append((f"ds_config.{'.'.join(path)}", old_value, new_value, where))
    old_params, new_params = (block(config, "optimizer", "params") for config in (old, new))
    for key in sorted((set(old_params) | set(new_params)) - CASUAL_OPTIMIZER_KEYS):
        old_value, new_value = old_params.get(key), new_params.get(key)
        pairs.append((f"ds_config.optimizer.params.{key}", old_value, new_value, where))
    return pairs


def _same(old: Any, new: Any) -> bool:
    """Compare as JSON does: a tuple is a list, 1 is 1.0."""
    if isinstance(new, tuple):
        new = list(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = {str(key) for key in old} | {str(key) for key in new}
        return all(
            _same(old.get(key), {str(k): v for k, v in new.items()}.get(key)) for key in keys
        )
    return old == new
