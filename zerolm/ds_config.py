"""DeepSpeed's JSON: read it, ask it, and find what it decides of the run.

Explicit numbers become the run's settings; a number that contradicts a flag is refused with both
shown. ds_schema.py knows the keys, ds_rules.py which combinations work, and ds_resolve.py fills in
what is left to the run; this file never imports DeepSpeed.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from zerolm.ds_schema import AUTO, LARGEST
from zerolm.settings import Settings
from zerolm.values import read_json, shown

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_STEP_KEYS = {"warmup_tokens": "warmup_num_steps", "total_tokens": "total_num_steps"}


class Fixed(NamedTuple):
    """A setting that the JSON has decided, the dotted key that did it, and what stands there."""

    value: Any
    key: str
    written: str | None = None


def load_ds_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed config file; comments are allowed, as DeepSpeed allows them (hjson).

    Raises:
        ConfigError: the file is missing, not readable, or holds no object.
    """

    def loads(text: str, **options: Any) -> Any:
        try:
            return json.loads(text, **options)
        except json.JSONDecodeError as error:
            import hjson

            try:
                return hjson.loads(text, **options)
            except hjson.HjsonDecodeError:
                raise error from None

    return read_json(path, "DeepSpeed's JSON, for example ds_configs/zero2.json", loads)


# -------------------------------------------------------------------------------------------------
# Questions


def block(ds_config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return a nested block, empty when there is none that can be read."""
    value: Any = ds_config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def count(ds_config: Mapping[str, Any], key: str) -> int | None:
    """Return a top-level positive whole number, None when it is absent, "auto" or unfit."""
    value = ds_config.get(key)
    return int(value) if is_number(value) and value >= 1 and value == int(value) else None


def zero_stage(ds_config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage, 1 where none is written (see `resolve`); 0 when it is unfit."""
    stage = block(ds_config, "zero_optimization").get("stage", 1)
    return stage if isinstance(stage, int) and stage in (0, 1, 2, 3) else 0


def offload_device(ds_config: Mapping[str, Any], what: str) -> str:
    """Return `none`, `cpu` or `nvme`.

    Args:
        what: `optimizer` or `param`.
    """
    zero = block(ds_config, "zero_optimization")
    old_key = "cpu_offload" if what == "optimizer" else "cpu_offload_param"
    if zero.get(old_key) is True:
        return "cpu"
    return str(block(zero, f"offload_{what}").get("device") or "none")


def optimizer_offload(ds_config: Mapping[str, Any]) -> str:
    """Return where the optimizer states and their arithmetic are: `none`, `cpu` or `nvme`."""
    return offload_device(ds_config, "optimizer")


def optimizer_type(ds_config: Mapping[str, Any]) -> str:
    """Return the optimizer's type as written, AdamW when there is none."""
    return str(block(ds_config, "optimizer").get("type", "AdamW"))


def precision(ds_config: Mapping[str, Any]) -> str:
    """Return that of the weights, `fp32`, `bf16` or `fp16`; "auto" will be resolved to bf16."""
    fp16 = block(ds_config, "fp16").get("enabled")
    bf16 = (block(ds_config, "bf16") or block(ds_config, "bfloat16")).get("enabled")
    if bf16 is True or (bf16 == AUTO and fp16 is not True):
        return "bf16"
    return "fp16" if fp16 is True else "fp32"


def compute_precision(ds_config: Mapping[str, Any]) -> str:
    """Return that of matrix products: `bf16` under torch_autocast, else that of the weights."""
    autocast = block(ds_config, "torch_autocast").get("enabled") is True
    return "bf16" if autocast else precision(ds_config)  # ds_rules.py refuses other autocasts


# -------------------------------------------------------------------------------------------------
# What the JSON decides


def fixed_settings(
    ds_config: Mapping[str, Any], *, seq_len: int, world_size: int
) -> tuple[dict[str, Fixed], list[str]]:
    """Find the settings that the JSON decides, and where it contradicts itself.

    Args:
        seq_len: tokens of a sequence; DeepSpeed counts batches in sequences.
        world_size: number of ranks.

    Returns:
        Fixed values by name of the setting, and problems without the file's name.
    """
    fixed, problems = _fixed_batch(ds_config, seq_len, world_size)
    writer = block(ds_config, "checkpoint").get("writer")
    if isinstance(writer, Mapping) and isinstance(writer.get("decoupled", False), bool):
        decoupled = writer.get("decoupled", False)
        fixed["async_checkpoint"] = Fixed(decoupled, "checkpoint.writer.decoupled")
    params = block(ds_config, "optimizer", "params")
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        if is_number(value := params.get(key)):
            fixed[name] = Fixed(float(value), f"optimizer.params.{key}")
    betas = params.get("betas")
    if isinstance(betas, (list, tuple)) and len(betas) == 2 and all(map(is_number, betas)):
        fixed["beta1"] = Fixed(float(betas[0]), "optimizer.params.betas")
        fixed["beta2"] = Fixed(float(betas[1]), "optimizer.params.betas")
    scheduler = block(ds_config, "scheduler")
    kind, params = str(scheduler.get("type")), block(scheduler, "params")
    if kind in SCHEDULES:
        fixed["schedule"] = Fixed(SCHEDULES[kind], "scheduler.type", f"{kind} ({SCHEDULES[kind]})")
        if is_number(params.get("warmup_max_lr")):
            peak = float(params["warmup_max_lr"])
            fixed["learning_rate"] = Fixed(peak, "scheduler.params.warmup_max_lr")
    if kind == "WarmupDecayLR":
        floor = params.get("warmup_min_lr", 0.0)
        value = float(floor) if is_number(floor) else 0.0
        fixed["min_learning_rate"] = Fixed(value, "scheduler.params.warmup_min_lr")
    elif scheduler and kind not in SCHEDULES:
        for name in ("schedule", "min_learning_rate", "warmup_tokens"):
            fixed[name] = Fixed(None, "scheduler.type", kind)
    return fixed, problems


def _fixed_batch(
    ds_config: Mapping[str, Any], seq_len: int, world_size: int
) -> tuple[dict[str, Fixed], list[str]]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, accumulation = (count(ds_config, key) for key in keys)
    fixed: dict[str, Fixed] = {}
    if batch and accumulation and not micro and batch % (accumulation * world_size):
        return fixed, [
            f"train_batch_size: {batch}, must be a multiple of gradient_accumulation_steps "
            f"{accumulation} x world size {world_size}. Change one of them."
        ]
    if micro and accumulation:
        product = micro * accumulation * world_size
        if batch and batch != product:
            return fixed, [
                f"train_batch_size: {batch}, must be train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {accumulation} x world size {world_size} = {product}."
                f' Set one of them to "auto".'
            ]
        fixed["batch_tokens"] = Fixed(
            product * seq_len, f"{keys[1]} {micro} x {keys[2]} {accumulation} x ranks x seq_len"
        )
    if batch:
        fixed["batch_tokens"] = Fixed(batch * seq_len, "train_batch_size x seq_len")
        if accumulation and not micro:
            micro = batch // (accumulation * world_size)
    if micro:
        fixed["micro_batch_size"] = Fixed(micro, keys[1])
    return fixed, []


def fixed_tokens(
    ds_config: Mapping[str, Any], settings: Settings, tokens_after: Callable[[int], int]
) -> tuple[dict[str, Fixed], list[str]]:
    """Find the token counts that the scheduler's step counts decide.

    Args:
        settings: explicit ones are compared in steps: a count that ends within the same step is
            no contradiction.
        tokens_after: tokens that a number of optimizer steps consumes.
    """
    fixed: dict[str, Fixed] = {}
    problems = []
    params = block(ds_config, "scheduler", "params")
    flat = "warmup_min_lr" in params and params["warmup_min_lr"] == params.get("warmup_max_lr")
    for name, key in _STEP_KEYS.items():
        steps = params.get(key)
        if not is_number(steps) or (flat and name == "warmup_tokens"):
            continue
        tokens, given = tokens_after(int(steps)), getattr(settings, name)
        # One step is the least that DeepSpeed's schedulers warm up: it stands for none.
        least = -1 if steps == 1 else tokens_after(int(steps) - 1)
        if name in settings.explicit and not least < given <= tokens:
            problems.append(
                f"scheduler.params.{key}: {shown(steps)} steps are {tokens} tokens, contradicts "
                f'{settings.where(name)} {given}. Remove one, or write "auto".'
            )
        elif name not in settings.explicit:
            fixed[name] = Fixed(tokens, f"scheduler.params.{key}")
    return fixed, problems


def contradictions(fixed: Mapping[str, Fixed], settings: Settings, name: str) -> list[str]:
    """Compare what the JSON decides with what the user gave explicitly.

    Args:
        name: of the JSON file, for the messages.
    """
    problems = []
    for setting, (value, key, written) in fixed.items():
        if setting not in settings.explicit:
            continue
        given = getattr(settings, setting)
        same = given == value
        if is_number(given) and is_number(value):
            same = math.isclose(given, value, rel_tol=1e-9)
        if not same:
            said = written or ("decides it" if value is None else shown(value))
            problems.append(
                f"{name}: {key}: {said}, contradicts {settings.where(setting)} {shown(given)}. "
                f'Remove one of them, or write "auto" in the JSON.'
            )
    return problems


def is_number(value: Any) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < LARGEST  # also not infinite, and not "not a number"
