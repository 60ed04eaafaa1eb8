"""Whether a command may go on with a run: run.json against what the command says. Pure.

What decides the curve must be the same as when the run began. What decides memory and speed may
change: micro-batch, workers, intervals, ZeRO profile. Under a router's loss the cut of the batch
into micro-batches is a part of the curve.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.ds_config import block, compute_precision, precision
from zerolm.settings import Settings, split_weight
from zerolm.values import shown

CURVE_SETTINGS = (
    "seed",
    "seq_len",
    "document_mask",
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
)
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


def differences(
    record: Mapping[str, Any],
    path: str,
    settings: Settings,
    *,
    model_config: Mapping[str, Any],
    ds_config: Mapping[str, Any],
    data_fingerprint: str,
    world_size: int,
    router_loss: bool,
) -> list[str]:
    """Compare a run's record with what a command asks for, both resolved.

    Args:
        record: the content of run.json.
        path: of run.json, for the messages.
        model_config: as `to_diff_dict()` gives it.
        router_loss: the loss depends on how the batch is cut into micro-batches.

    Returns:
        One line for each thing that would change the curve.
    """
    old_settings = block(record, "settings")
    pairs: list[tuple[str, Any, Any, str]] = []
    for name in CURVE_SETTINGS:
        constant = settings.schedule == old_settings.get("schedule") == "constant"
        if constant and name == "total_tokens":
            continue  # a constant rate does not look ahead: the run may be made longer
        old, new = old_settings.get(name), getattr(settings, name)
        where = settings.where(name)
        if name == "total_tokens":
            where += f"; a {settings.schedule} schedule looks ahead to it, a constant one would not"
        pairs.append((f"settings.{name}", old, new, where))
    old_data = old_settings.get("data") or []
    pairs.append(
        ("settings.data", _weights(old_data), _weights(settings.data), settings.where("data"))
    )
    old_print = record.get("data_fingerprint")
    pairs.append(("data_fingerprint", old_print, data_fingerprint, "other tokens in --data"))
    if router_loss:
        old, new = old_settings.get("micro_batch_size"), settings.micro_batch_size
        pairs.append(("settings.micro_batch_size", old, new, "output_router_logits"))
        pairs.append(("world_size", record.get("world_size"), world_size, "output_router_logits"))
    pairs += _model_pairs(block(record, "model_config"), model_config)
    pairs += _ds_pairs(block(record, "ds_config"), ds_config)
    return [
        f"{path}: {key}: {shown(old)}, but this command has {shown(new)} ({where}). Give the old "
        f"value to go on with the run, or choose another --run_dir."
        for key, old, new, where in pairs
        if not _same(old, new)
    ]


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
