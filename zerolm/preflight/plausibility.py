"""Return notices about values that are valid but implausible for the model or the data.

Notices never stop a run, because a test of a few steps may use a tiny source and any learning rate.
"""

from zerolm.config import defaults
from zerolm.data.epochs import times
from zerolm.ds_config.optimizers import ADAM
from zerolm.optim.schedule import SCHEDULES
from zerolm.plan.plan import Plan
from zerolm.preflight.summary import epochs_of

MANY_EPOCHS = 10  # Muennighoff et al. 2023 (arXiv 2305.16264): little gain beyond 16
HIGH_RATE, LOW_RATE = 10, 1 / 1000  # relative to the default learning rate
UNUSED_ROWS = 0.5  # share of the vocabulary
LONG_WARMUP = 0.5  # share of the run's tokens
FEW_STEPS = 5  # with fewer steps, --total_tokens may have been intended as a number of steps


def notices(plan: Plan) -> list[str]:
    """Return a notice for each implausible value."""
    return [
        *_length_notices(plan),
        *_rate_notices(plan),
        *_vocabulary_notices(plan),
        *_epoch_notices(plan),
    ]


def _length_notices(plan: Plan) -> list[str]:
    settings, steps = plan.settings, plan.total_steps
    if steps > FEW_STEPS or "total_tokens" not in settings.explicit:
        return []
    total, batch = settings.total_tokens, settings.batch_tokens
    return [
        f"{settings.where('total_tokens')}: {total:,} tokens are {steps} step(s) of {batch:,} "
        f"tokens; {total:,} steps would be --total_tokens {total * batch}"
    ]


def _rate_notices(plan: Plan) -> list[str]:
    settings, rate = plan.settings, plan.settings.learning_rate
    default = defaults.learning_rate(plan.flops_per_token * settings.total_tokens)
    found = []
    if plan.ds.optimizer.kind in ADAM and not LOW_RATE <= rate / default <= HIGH_RATE:
        found.append(
            f"{settings.where('learning_rate')}: {rate:g} is {times(rate / default)} times the "
            f"default for this model and total, {default:g}"
        )
    schedule = SCHEDULES.get(settings.schedule or "")
    if schedule and schedule.uses_minimum and settings.min_learning_rate == rate > 0:
        found.append(
            f"{settings.where('min_learning_rate')}: {rate:g} is the peak, so {settings.schedule} "
            f"does not decay"
        )
    if (settings.warmup_tokens or 0) > LONG_WARMUP * settings.total_tokens:
        found.append(
            f"{settings.where('warmup_tokens')}: {settings.warmup_tokens:,} of "
            f"{settings.total_tokens:,} tokens, so most of the run trains below the peak learning "
            "rate"
        )
    return found


def _vocabulary_notices(plan: Plan) -> list[str]:
    rows = plan.model.vocab_size
    used = max(source.vocab_size for source in [*plan.sources, *plan.val_sources])
    if rows * (1 - UNUSED_ROWS) <= used:
        return []
    return [
        f"{plan.model.path}: vocab_size: {rows:,}, but the tokenizer has {used:,} tokens: no token "
        f"uses {1 - used / rows:.0%} of the rows of the embedding and the output head"
    ]


def _epoch_notices(plan: Plan) -> list[str]:
    return [
        f"{plan.settings.where('total_tokens')}: {plan.settings.total_tokens:,} tokens read source "
        f"{name} {times(epochs)} times; beyond about {MANY_EPOCHS} times the model learns little "
        "new. Add data, train on fewer tokens, or set --max_epochs"
        for name, epochs, cap in zip(
            plan.source_names, epochs_of(plan), plan.mixture.caps, strict=True
        )
        if epochs > MANY_EPOCHS and cap is None
    ]
