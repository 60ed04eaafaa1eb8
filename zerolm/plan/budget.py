"""Fill in and check a run's token budget, batch size, schedule and intervals.

`zerolm.plan.resolve` calls these functions; the formulas are in `zerolm.config.defaults`. Messages
suggest the nearest allowed values. Must not import torch.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zerolm.config import defaults
from zerolm.config.settings import Settings
from zerolm.ds_config.implied import WARMUP_STEPS, Implied
from zerolm.optim.schedule import SCHEDULES, WITH_DECAY_TOKENS, BatchSchedule, LearningRate


def apply_implied(settings: Settings, implied: Mapping[str, Implied], name: str) -> Settings:
    """Return the settings with the values implied by the DeepSpeed JSON, called `name` in messages.

    Values set by a flag do not change.
    """
    new = {key: value for key, (value, *_) in implied.items() if key not in settings.explicit}
    origins = {key: f"{name}: {implied[key].key}" for key in new}
    return replace(settings, **new, origins={**settings.origins, **origins})


def fill_batch(
    settings: Settings,
    seq_len: int,
    num_parameters: int,
    flops_per_token: float,
    multiple: int = 1,
) -> Settings:
    """Fill in the batch size and its ramp, which all other defaults depend on.

    Args:
        multiple: a default batch is rounded up to a multiple of this number of sequences.
    """
    total = settings.total_tokens or defaults.TOKENS_PER_PARAMETER * num_parameters
    batch = settings.batch_tokens
    if batch is None:
        sequences = defaults.batch_sequences(flops_per_token * total, seq_len, total)
        batch = -(-sequences // multiple) * multiple * seq_len
    ramp = settings.batch_ramp_tokens
    if settings.batch_ramp_start and ramp is None:
        ramp = defaults.ramp_tokens(total)
    elif not settings.batch_ramp_start and "batch_ramp_tokens" not in settings.explicit:
        ramp = None
    return replace(settings, batch_tokens=batch, batch_ramp_tokens=ramp)


def fill_remaining(
    settings: Settings,
    schedule: BatchSchedule,
    *,
    num_parameters: int,
    flops_per_token: float,
    has_validation: bool,
    json_schedules: bool,
    betas: tuple[float, float] | None,
) -> Settings:
    """Fill in every setting that is still None and has a default.

    Args:
        settings: settings with the batch size filled in.
        json_schedules: the DeepSpeed JSON has a scheduler that is not one of `--schedule`.
        betas: default betas of the optimizer; None if it has no betas.
    """
    seq_len, batch = settings.seq_len or 1, settings.batch_tokens or 1
    total = settings.total_tokens or defaults.TOKENS_PER_PARAMETER * num_parameters
    peak = settings.learning_rate
    if peak is None:
        peak = defaults.learning_rate(flops_per_token * total)
    kind = settings.schedule or (None if json_schedules else "cosine")
    low = settings.min_learning_rate
    if low is None and kind is not None and SCHEDULES[kind].uses_minimum:
        low = defaults.min_learning_rate(peak)
    warmup = settings.warmup_tokens
    if warmup is None and kind is not None:
        warmup = defaults.warmup_tokens(total, batch)
    decay = settings.decay_tokens
    if kind is None or not SCHEDULES[kind].uses_decay_tokens:
        decay = decay if "decay_tokens" in settings.explicit else None
    elif decay is None:
        decay = defaults.decay_tokens(total, warmup or 0)
    steps = num_steps(schedule, seq_len, total)
    filled: dict[str, Any] = {
        "total_tokens": total,
        "learning_rate": peak,
        "schedule": kind,
        "min_learning_rate": low,
        "warmup_tokens": warmup,
        "decay_tokens": decay,
        "weight_decay": _or(settings.weight_decay, defaults.WEIGHT_DECAY),
        "beta1": _or(settings.beta1, betas[0]) if betas else None,
        "beta2": _or(settings.beta2, betas[1]) if betas else None,
        "log_interval": settings.log_interval or defaults.interval(steps, "log"),
        "checkpoint_interval": settings.checkpoint_interval
        or defaults.interval(steps, "checkpoint"),
        "rollback_margin": defaults.rollback_margin(steps)
        if settings.rollback_margin is None
        else settings.rollback_margin,
    }
    if has_validation:
        filled["eval_interval"] = settings.eval_interval or defaults.interval(steps, "eval")
        filled["eval_tokens"] = settings.eval_tokens or defaults.eval_tokens(seq_len)
    return replace(settings, **filled)


def default_interval(settings: Settings, what: str) -> int:
    """Return the default of an interval in steps; all other settings must be filled in."""
    schedule, total = batch_schedule(settings), settings.total_tokens or 0
    return defaults.interval(num_steps(schedule, settings.seq_len or 1, total), what)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def batch_schedule(settings: Settings) -> BatchSchedule:
    """Return the batch schedule; `seq_len` and `batch_tokens` must be valid."""
    seq_len = settings.seq_len or 1
    return BatchSchedule(
        (settings.batch_tokens or 0) // seq_len,
        (settings.batch_ramp_start or 0) // seq_len,
        math.ceil((settings.batch_ramp_tokens or 0) / seq_len),
    )


def learning_rate(settings: Settings) -> LearningRate:
    """Return the learning rate schedule; the DeepSpeed JSON must not define a scheduler."""
    assert settings.schedule is not None
    return LearningRate(
        settings.schedule,
        settings.learning_rate,
        settings.min_learning_rate or 0.0,
        settings.warmup_tokens or 0,
        settings.decay_tokens or 0,
        settings.total_tokens,
    )


def sequences_after(schedule: BatchSchedule, steps: int) -> int:
    """Return how many sequences are read in the first `steps` optimizer steps."""
    position = 0
    while steps > 0 and schedule.start_sequences and position < schedule.ramp_sequences:
        position += schedule(position)
        steps -= 1
    return position + max(0, steps) * schedule.batch_sequences


def num_steps(schedule: BatchSchedule, seq_len: int, tokens: int) -> int:
    """Return the number of optimizer steps needed to train on the first `tokens` tokens of a
    run.
    """
    return schedule.steps(0, math.ceil(tokens / seq_len))


def total_sequences(settings: Settings) -> int:
    """Return how many sequences the complete run reads; its last batch is full."""
    schedule = batch_schedule(settings)
    steps = num_steps(schedule, settings.seq_len or 1, settings.total_tokens or 0)
    return sequences_after(schedule, steps)


# -------------------------------------------------------------------------------------------------
# Rules


def batch_problems(settings: Settings, world_size: int) -> list[str]:
    """Return a problem if a batch cannot be divided into sequences, ranks and micro-batches."""
    seq_len, batch, start = settings.seq_len, settings.batch_tokens, settings.batch_ramp_start
    if not seq_len or not batch:
        return []
    problems = []
    for name, tokens in (("batch_tokens", batch), ("batch_ramp_start", start)):
        if tokens and tokens % seq_len:
            problems.append(
                f"{settings.where(name)}: {tokens} must be a multiple of --seq_len {seq_len}. "
                f"Use {defaults.nearest_multiples(tokens, seq_len)}."
            )
    if settings.batch_ramp_tokens and not start:
        problems.append(
            f"{settings.where('batch_ramp_tokens')}: {settings.batch_ramp_tokens} needs "
            f"--batch_ramp_start. Add it, or remove this flag."
        )
    if problems:
        return problems
    if start and (batch % start or start == batch):
        return [
            f"{settings.where('batch_ramp_start')}: {start} must be a smaller divisor of "
            f"--batch_tokens {batch}. Use for example {batch // 4 or seq_len}."
        ]
    name, smallest = ("batch_ramp_start", start) if start else ("batch_tokens", batch)
    sequences = smallest // seq_len
    micro = settings.micro_batch_size or 1
    if sequences % (micro * world_size) == 0:
        return []
    unit = micro * world_size * seq_len
    fits = [str(size) for size in _divisors(sequences // world_size)]
    problem = (
        f"{settings.where(name)}: {smallest} tokens are {sequences} sequences, which must be a "
        f"multiple of {world_size} rank(s) x micro-batch {micro}. Use --{name} "
        f"{defaults.nearest_multiples(smallest, unit)}"
    )
    if sequences % world_size == 0:
        problem += f", or --micro_batch_size {' or '.join(fits)}"
    return [problem + "."]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, min(number, 1024) + 1) if number % size == 0][-6:]


def schedule_problems(settings: Settings) -> list[str]:
    """Return the problems with learning rates, warm-up, decay and evaluation.

    Settings that are None are not checked.
    """
    problems = []
    total, warmup, decay = settings.total_tokens, settings.warmup_tokens, settings.decay_tokens
    peak, low, kind = settings.learning_rate, settings.min_learning_rate, settings.schedule
    if total and warmup and warmup > total:
        problems.append(_long_warmup(settings, warmup, total))
    if decay and kind is not None and not SCHEDULES[kind].uses_decay_tokens:
        problems.append(
            f"{settings.where('decay_tokens')}: {decay} needs --schedule {WITH_DECAY_TOKENS}, got "
            f"{kind}. Remove it (--no-decay_tokens), or use --schedule {WITH_DECAY_TOKENS}."
        )
    elif decay and total and decay + (warmup or 0) > total:
        problems.append(
            f"{settings.where('decay_tokens')}: {decay} plus --warmup_tokens {warmup or 0} must "
            f"not exceed --total_tokens {total}. Use at most {max(1, total - (warmup or 0))}."
        )
    ends_low = kind is None or SCHEDULES[kind].uses_minimum
    if ends_low and peak is not None and low is not None and low > peak:
        problems.append(
            f"{settings.where('min_learning_rate')}: {low} must not exceed --learning_rate "
            f"{peak}. Lower it, for example to {peak / 10:.3g}."
        )
    ramp = settings.batch_ramp_tokens
    if ramp and total and ramp > total:
        problems.append(
            f"{settings.where('batch_ramp_tokens')}: {ramp} must not exceed --total_tokens "
            f"{total}. Use for example {max(1, total // 10)}."
        )
    return problems + _evaluation_problems(settings)


def _long_warmup(settings: Settings, warmup: int, total: int) -> str:
    """Return the message for a warm-up longer than the run, in steps or tokens as set by the
    user.
    """
    where = settings.where("warmup_tokens")
    if not where.endswith(WARMUP_STEPS) or not settings.seq_len or not settings.batch_tokens:
        return (
            f"{where}: {warmup} must not exceed --total_tokens {total}. Use for example "
            f"{max(1, total // 100)}."
        )
    schedule = batch_schedule(settings)
    steps, last = (num_steps(schedule, settings.seq_len, tokens) for tokens in (warmup, total))
    return (
        f"{where}: {steps} steps must not exceed the {last} steps of the run (--total_tokens "
        f'{total}). Use for example {max(1, last // 100)}, or "auto".'
    )


def _evaluation_problems(settings: Settings) -> list[str]:
    problems = [
        f"{settings.where(name)}: {getattr(settings, name)} needs --val_data. Add it, or remove "
        f"this flag."
        for name in ("eval_interval", "eval_tokens")
        if name in settings.explicit and not settings.val_data
    ]
    tokens, seq_len = settings.eval_tokens, settings.seq_len
    if settings.val_data and tokens and seq_len and tokens < seq_len:
        problems.append(
            f"{settings.where('eval_tokens')}: {tokens} must be at least --seq_len {seq_len}, one "
            f"sequence. Use {seq_len} or more."
        )
    return problems
