"""Finds the settings that a DeepSpeed JSON fixes, and contradictions with flags.

Explicit values in the JSON become settings. A value that contradicts an explicit flag is refused
with a message that shows both. `zerolm.plan.resolve` applies the result. Reads no files.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zerolm.common.values import shown, shown_setting
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile, is_number

DEEPSPEED_SCHEDULES = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
RANGE_TEST_RATE = 1e-3  # DeepSpeed's default of lr_range_test_min_lr
WARMUP_STEPS = "warmup_num_steps"
_STEP_KEYS = {"warmup_tokens": WARMUP_STEPS, "total_tokens": "total_num_steps"}


class Implied(NamedTuple):
    """The value that the JSON fixes for a setting.

    Attributes:
        key: dotted JSON key.
        written: text to show for the value in messages; None: `value` itself.
    """

    value: Any
    key: str
    written: str | None = None


def implied_settings(
    profile: Profile, *, seq_len: int, replicas: int
) -> tuple[dict[str, Implied], list[str]]:
    """Find the settings that the JSON fixes, and contradictions within the JSON.

    Args:
        seq_len: number of tokens per sequence, since DeepSpeed counts batches in sequences.
        replicas: number of data-parallel replicas.

    Returns:
        {setting name: implied value}, and problems that do not yet begin with the file's name.
    """
    implied, problems = _implied_batch(profile, seq_len, replicas)
    writer = profile.block("checkpoint").get("writer")
    if isinstance(writer, Mapping) and isinstance(writer.get("decoupled", False), bool):
        decoupled = writer.get("decoupled", False)
        implied["async_checkpoint"] = Implied(decoupled, "checkpoint.writer.decoupled")
    params = profile.optimizer.params
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        if not is_number(value := params.get(key)):
            continue
        if value < 0:
            problems.append(f"optimizer.params.{key}: {value:g} must not be negative. Correct it.")
        else:
            implied[name] = Implied(float(value), f"optimizer.params.{key}")
    betas = params.get("betas")
    if isinstance(betas, (list, tuple)) and len(betas) == 2 and all(map(is_number, betas)):
        implied["beta1"] = Implied(float(betas[0]), "optimizer.params.betas")
        implied["beta2"] = Implied(float(betas[1]), "optimizer.params.betas")
    return implied | _implied_schedule(profile) | _implied_trackers(profile), problems


def _implied_trackers(profile: Profile) -> dict[str, Implied]:
    """Find the tracker settings in DeepSpeed's monitor blocks; `rules` adds notices about them."""
    implied = {}
    wandb = profile.block("wandb")
    if wandb.get("enabled") is True:
        for name, key in (("project", "project"), ("group", "group"), ("entity", "team")):
            if value := wandb.get(key):
                implied[f"wandb_{name}"] = Implied(value, f"wandb.{key}")
    if profile.block("tensorboard").get("enabled") is True:
        implied["tensorboard"] = Implied(True, "tensorboard.enabled")
    return implied


def _implied_schedule(profile: Profile) -> dict[str, Implied]:
    kind, params = profile.scheduler, profile.scheduler_params
    if kind is None:
        return {}
    if kind not in DEEPSPEED_SCHEDULES:
        names = ("schedule", "min_learning_rate", "warmup_tokens")
        implied = {name: Implied(None, "scheduler.type", kind) for name in names}
        key = "cycle_max_lr" if kind == "OneCycle" else "lr_range_test_min_lr"
        if is_number(rate := params.get(key, RANGE_TEST_RATE)):
            implied["learning_rate"] = Implied(float(rate), f"scheduler.params.{key}")
        return implied
    implied = {
        "schedule": Implied(
            DEEPSPEED_SCHEDULES[kind], "scheduler.type", f"{kind} ({DEEPSPEED_SCHEDULES[kind]})"
        )
    }
    if is_number(peak := params.get("warmup_max_lr")):
        implied["learning_rate"] = Implied(float(peak), "scheduler.params.warmup_max_lr")
    if kind == "WarmupCosineLR" and is_number(ratio := params.get("cos_min_ratio")):
        key = "scheduler.params.cos_min_ratio"
        implied["min_learning_rate"] = Implied(None, key, shown(ratio))
    if kind == "WarmupDecayLR":
        low = params.get("warmup_min_lr", 0.0)
        value = float(low) if is_number(low) else 0.0
        implied["min_learning_rate"] = Implied(value, "scheduler.params.warmup_min_lr")
    return implied


def _implied_batch(
    profile: Profile, seq_len: int, replicas: int
) -> tuple[dict[str, Implied], list[str]]:
    batch, micro, accumulation = (
        profile.batch_size, profile.micro_batch_size, profile.accumulation
    )  # fmt: skip
    implied: dict[str, Implied] = {}
    if batch and accumulation and not micro and batch % (accumulation * replicas):
        return implied, [
            f"train_batch_size: {batch} must be a multiple of gradient_accumulation_steps "
            f"{accumulation} x world size {replicas}. Change one of them."
        ]
    if micro and accumulation:
        product = micro * accumulation * replicas
        if batch and batch != product:
            return implied, [
                f"train_batch_size: {batch} must be train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {accumulation} x world size {replicas} = {product}."
                f' Set one of them to "auto".'
            ]
        implied["batch_tokens"] = Implied(
            product * seq_len,
            f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {accumulation} "
            f"x ranks x seq_len",
        )
    if batch:
        implied["batch_tokens"] = Implied(batch * seq_len, "train_batch_size x seq_len")
        if accumulation and not micro:
            micro = batch // (accumulation * replicas)
    if micro:
        implied["micro_batch_size"] = Implied(micro, "train_micro_batch_size_per_gpu")
    return implied, []


def implied_token_counts(
    profile: Profile, settings: Settings, tokens_after: Callable[[int], int]
) -> tuple[dict[str, Implied], list[str]]:
    """Find the token counts that the scheduler's step counts fix.

    Args:
        settings: settings whose explicit token counts are compared in steps, so a count that ends
            within the same step is not a contradiction.
        tokens_after: function from a number of optimizer steps to the number of tokens consumed by
            then.
    """
    implied: dict[str, Implied] = {}
    problems = []
    params = profile.scheduler_params
    no_warmup = "warmup_min_lr" in params and params["warmup_min_lr"] == params.get("warmup_max_lr")
    for name, key in _STEP_KEYS.items():
        steps = params.get(key)
        if not is_number(steps) or (no_warmup and name == "warmup_tokens"):
            continue
        tokens, given = tokens_after(int(steps)), getattr(settings, name)
        # A single step may also stand for no warm-up, since DeepSpeed's shortest warm-up is one
        # step.
        lower = -1 if steps <= 1 else tokens_after(int(steps) - 1)
        if name in settings.explicit and not lower < given <= tokens:
            problems.append(
                f"scheduler.params.{key}: {shown(steps)} steps are {tokens} tokens, which "
                f'contradicts {settings.where(name)} {given}. Remove one, or write "auto".'
            )
        elif name not in settings.explicit:
            implied[name] = Implied(tokens, f"scheduler.params.{key}")
    return implied, problems


def contradictions(
    implied: Mapping[str, Implied], settings: Settings, profile: Profile
) -> list[str]:
    """Find explicit settings that contradict values fixed by the JSON."""
    problems = []
    for setting, (value, key, written) in implied.items():
        if setting not in settings.explicit:
            continue
        given = getattr(settings, setting)
        same = given == value
        if is_number(given) and is_number(value):
            same = math.isclose(given, value, rel_tol=1e-9)
        if not same:
            text, where = written or shown(value), settings.where(setting)
            problems.append(
                f"{profile.name}: {key}: {text} contradicts {where} "
                f'{shown_setting(where, given)}. Remove one of them, or write "auto" in the JSON.'
            )
    return problems
