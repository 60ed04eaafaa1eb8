"""Compare a run's run.json with the plan of a command that would resume the run.

Values that affect the loss curve must not change, unless --accept_changes is given and the states
in checkpoints remain valid; `carry_over` then returns the position in the data. Values that affect
only memory and speed may change: micro-batch, workers, intervals, ZeRO profile. If the router loss
is computed per micro-batch, micro-batch size and world size also affect the curve. Must not read
files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerolm.checkpoint.manifest import Progress
from zerolm.common.values import shown
from zerolm.config.settings import Settings, split_weight
from zerolm.data.mixture import (
    blend_record,
    blends_from_record,
    describe_blends,
    same_order_until,
)
from zerolm.data.order import Blend
from zerolm.data.skips import used_sequences_end
from zerolm.ds_config.profile import Profile, block
from zerolm.model.architecture import router_loss_coefficient
from zerolm.optim.schedule import EXTENDABLE, SCHEDULES
from zerolm.parts.settings import CURVE_SETTINGS, FLAGS, STATIC_DEFAULTS
from zerolm.plan.plan import Plan
from zerolm.run_dir.records import OLD_VALUE

MIXTURE_SETTINGS = ("data_stage", "max_epochs", "mixture_temperature", "over_max_epochs")
# Defaults for settings that an old run's run.json lacks.
LEGACY_DEFAULTS = {
    name: STATIC_DEFAULTS[name] for name in CURVE_SETTINGS if STATIC_DEFAULTS[name] is not None
}
# Keys written by transformers that do not affect training.
IRRELEVANT_MODEL_KEYS = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache"}
)
IRRELEVANT_OPTIMIZER_KEYS = frozenset(
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
# DeepSpeed JSON values that affect the curve, apart from precision and optimizer parameters.
DS_VALUES: dict[str, Callable[[Profile], Any]] = {
    "gradient_clipping": lambda profile: profile.json.get("gradient_clipping"),
    "data_types.grad_accum_dtype": lambda profile: profile.grad_accum_dtype,
    "optimizer.type": lambda profile: profile.block("optimizer").get("type"),
    "scheduler": lambda profile: profile.json.get("scheduler"),
}
# {key prefix: reason} for values that cannot change even with --accept_changes.
UNCHANGEABLE = {
    **{f"settings.{name}": why for name in FLAGS if (why := FLAGS[name]["unchangeable"])},
    "initial_weights.": "the run started from the old weights",
    "model_config.": "the checkpoints hold the weights of the old model",
    "ds_config precision": "the optimizer states were saved for weights in the old precision",
    "ds_config.optimizer.type": "another optimizer has different states",
    "ds_config.optimizer.params.amsgrad": "an optimizer state would be missing",
    "ds_config.optimizer.params.fp32_optimizer_states": "the states were saved in that precision",
    "ds_config.scheduler": "its saved position is not valid for another schedule",
}


@dataclass(frozen=True)
class Difference:
    """A changed value that affects the loss curve.

    Attributes:
        where: flag or file that set the new value.
    """

    key: str
    old: Any
    new: Any
    where: str

    @property
    def obstacle(self) -> str:
        """Why the run cannot resume with the new value; empty if it can."""
        return next((why for start, why in UNCHANGEABLE.items() if self.key.startswith(start)), "")

    def __str__(self) -> str:
        old, new = (
            value if isinstance(value, str) and value.isprintable() else shown(value)
            for value in (self.old, self.new)
        )
        return f"{self.key}: {old} -> {new}"


def problems(found: Sequence[Difference], path: str, *, accepted: bool) -> list[str]:
    """Return a problem for each difference that prevents a resume, with or without
    --accept_changes.

    `path` is the path of run.json.
    """
    lines = []
    for one in found:
        line = f"{path}: {one} ({one.where})"
        if one.obstacle:
            lines.append(
                f"{line} cannot be carried over: {one.obstacle}. {OLD_VALUE}, or choose another "
                f"--run_dir."
            )
        elif not accepted:
            lines.append(
                f"{line}. {OLD_VALUE}, or choose another --run_dir, or add --accept_changes to "
                "resume with the new value."
            )
    return lines


def data_order(plan: Plan) -> dict[str, Any]:
    """Return the values that determine the data order, to be recorded in a checkpoint's
    manifest.
    """
    order = {
        "seq_len": plan.settings.seq_len,
        "packing": plan.settings.packing,
        "seed": plan.settings.seed,
        "weights": [float(weight) for weight in plan.weights],
        "data_fingerprint": plan.data_fingerprint,
    }
    if plan.mixture.group > 1:
        order["group"] = plan.mixture.group
    later = [blend_record(blend) for blend in plan.mixture.blends[1:]]
    return {**order, "stages": later} if later else order


def _blends_of(order: Mapping[str, Any]) -> list[Blend]:
    """Return the data blends recorded by `data_order`."""
    return blends_from_record([[0, order["weights"]], *order.get("stages", [])])


def carry_over(progress: Progress, old: Mapping[str, Any], new: Mapping[str, Any]) -> Progress:
    """Return a checkpoint's progress, converted to this run's data order.

    The position in tokens stays the same; with another `seq_len` it is rounded up to a complete
    sequence. In a different order, sequence numbers refer to different text, so the skipped windows
    and the loss history are dropped. Blends that have not started yet may differ.

    Args:
        old, new: results of `data_order` for the checkpoint and for this run.
    """
    old, new = {**LEGACY_DEFAULTS, **old}, {**LEGACY_DEFAULTS, **new}
    fixed = used_sequences_end(progress.position, progress.skipped_windows)
    keys = {"group", *new} - {"weights", "stages"}
    alike = all(_same(old.get(key), new.get(key)) for key in keys)
    if alike and same_order_until(_blends_of(old), _blends_of(new), fixed):
        return progress
    position = -(-progress.position * old["seq_len"] // new["seq_len"])
    return replace(progress, position=position, skipped_windows=[], history={})


def differences(record: Mapping[str, Any], plan: Plan, fixed_sequences: int) -> list[Difference]:
    """Return the changed values that affect the loss curve.

    Args:
        record: content of the run's run.json.
        fixed_sequences: the run has consumed or skipped all sequence numbers below this.
    """
    settings, old_settings = plan.settings, block(record, "settings")
    pairs: list[tuple[str, Any, Any, str]] = []
    for name in CURVE_SETTINGS:
        schedule = SCHEDULES.get(settings.schedule or "")
        same = settings.schedule == old_settings.get("schedule")
        if name == "total_tokens" and same and schedule and not schedule.needs_total:
            continue  # the schedule does not depend on it, so the run may be extended
        if name == "min_learning_rate" and schedule and not schedule.uses_minimum:
            continue
        old, new = old_settings.get(name, LEGACY_DEFAULTS.get(name)), getattr(settings, name)
        where = settings.where(name)
        if name == "init_from" and _same_weights(record, plan):
            continue  # another name for the same weights
        if name == "total_tokens":
            where += f"; a {settings.schedule} schedule depends on it, {EXTENDABLE} does not"
        pairs.append((f"settings.{name}", old, new, where))
    ended = "this version no longer has this setting"
    pairs += [
        (f"settings.{name}", old, None, ended)
        for name, old in old_settings.items()
        if old and name not in FLAGS
    ]
    if plan.initial and settings.init_from == old_settings.get("init_from"):
        old, new = block(record, "initial_weights").get("digest"), plan.initial.digest
        pairs.append(("initial_weights.digest", old, new, f"{settings.init_from} has changed"))
    old_data = old_settings.get("data") or []
    pairs.append(
        ("settings.data", _weights(old_data), _weights(settings.data), settings.where("data"))
    )
    if pairs[-1][1] == pairs[-1][2] and settings.seq_len == old_settings.get("seq_len"):
        pairs.append(_blend_pair(record, settings, plan.mixture.blends, fixed_sequences))
    old_print = record.get("data_fingerprint")
    where = "--data has different tokens, or one of its manifest.json files has changed"
    pairs.append(("data_fingerprint", old_print, plan.data_fingerprint, where))
    if router_loss_coefficient(plan.model.config) and not settings.global_router_loss:
        old, new = old_settings.get("micro_batch_size"), settings.micro_batch_size
        pairs.append(("settings.micro_batch_size", old, new, "output_router_logits"))
        pairs.append(
            ("world_size", record.get("world_size"), plan.world_size, "output_router_logits")
        )
    pairs += _model_pairs(block(record, "model_config"), plan.model.config.to_diff_dict())
    where = f"--deepspeed_config; the run started on {record.get('device', 'an unknown device')}, "
    where += f"this is {plan.device_name}"
    old_profile = Profile.parse(block(record, "ds_config"))
    pairs.append(_precision_pair(old_profile, plan.ds, where))
    pairs += _ds_pairs(old_profile, plan.ds)
    return [Difference(*pair) for pair in pairs if not _same(pair[1], pair[2])]


def _same_weights(record: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether a run without a checkpoint would start from the recorded weights again."""
    if plan.initial is None or plan.initial.weights is None:
        return False
    return block(record, "initial_weights").get("digest") == plan.initial.digest


def _blend_pair(
    record: Mapping[str, Any], settings: Settings, new: Sequence[Blend], fixed_sequences: int
) -> tuple[str, Any, Any, str]:
    """Compare the data blends that have started; return the key, old and new value, and origin.
    Old runs had a single blend, which they did not record.
    """
    recorded = block(record, "mixture").get("stages")
    old = blends_from_record(recorded) if recorded else list(new[:1])
    where = next(
        (settings.where(name) for name in MIXTURE_SETTINGS if name in settings.explicit),
        settings.where("data"),
    )
    if same_order_until(old, new, fixed_sequences):
        return ("mixture", None, None, where)
    return ("mixture", describe_blends(old), describe_blends(new), where)


def _weights(sources: Any) -> list[float | None]:
    """Return the sources' weights, normalized to sum to 1.

    If the weights depend on the sources' sizes, all are None.
    """
    weights = [split_weight(source)[1] for source in sources]
    if any(weight is None for weight in weights):
        return [None] * len(weights)
    total = sum(weight for weight in weights if weight is not None)
    return [round(weight / total, 12) for weight in weights if weight is not None]


def _model_pairs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any, str]]:
    keys = sorted((set(old) | set(new)) - IRRELEVANT_MODEL_KEYS)
    return [(f"model_config.{key}", old.get(key), new.get(key), "--model_config") for key in keys]


def _precision_pair(old: Profile, new: Profile, where: str) -> tuple[str, Any, Any, str]:
    if old.precision != new.precision:
        return ("ds_config precision", old.precision, new.precision, where)
    return ("ds_config arithmetic", old.compute_precision, new.compute_precision, where)


def _ds_pairs(old: Profile, new: Profile) -> list[tuple[str, Any, Any, str]]:
    where, pairs = "--deepspeed_config", list[tuple[str, Any, Any, str]]()
    for key, read in DS_VALUES.items():
        pairs.append((f"ds_config.{key}", read(old), read(new), where))
    old_params, new_params = old.optimizer.params, new.optimizer.params
    for key in sorted((set(old_params) | set(new_params)) - IRRELEVANT_OPTIMIZER_KEYS):
        old_value, new_value = old_params.get(key), new_params.get(key)
        pairs.append((f"ds_config.optimizer.params.{key}", old_value, new_value, where))
    return pairs


def _same(old: Any, new: Any) -> bool:
    """Compare values as JSON: tuples equal lists, keys are strings, 1 equals 1.0."""
    if isinstance(new, tuple):
        new = list(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = {str(key) for key in old} | {str(key) for key in new}
        return all(
            _same(old.get(key), {str(k): v for k, v in new.items()}.get(key)) for key in keys
        )
    return old == new
