"""Resolve settings for preflight and `launch plan`: fill in values that the user did not set.

Missing values come from the DeepSpeed JSON, the model or a default; values given twice must agree.
`zerolm.plan.budget` does the arithmetic; `zerolm.ds_config.implied` reads the values that the JSON
sets. Must not read files.
"""

from dataclasses import replace

from zerolm.common.errors import Findings
from zerolm.config import defaults
from zerolm.config.settings import Settings
from zerolm.distributed.layout import Layout
from zerolm.ds_config import implied
from zerolm.ds_config.gathering import gathers_blocks
from zerolm.ds_config.optimizers import beta_problems, cycles_betas, takes_betas
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.resolve import resolve_profile
from zerolm.model import loss_chunks
from zerolm.model.flops import flops_per_token
from zerolm.model.model import Model
from zerolm.plan import budget, exchange, memory, stage_share
from zerolm.plan.rank_share import config_of_rank


def resolve_settings(
    settings: Settings,
    model: Model | None,
    profile: Profile,
    found: Findings,
    *,
    layout: Layout,
    memory_bytes: int | None,
    round_batch: bool = False,
    rank_imbalance: float = exchange.IMBALANCE,
) -> Settings:
    """Return the settings with missing values filled in; problems are added to `found`.

    Args:
        model: the run's model. If it could not be read (None), settings that depend on it stay
            None.
        memory_bytes: memory of one device; None on a CPU.
        round_batch: round a default batch size up to full micro-batches on every rank, instead of
            reporting that it is not divisible.
        rank_imbalance: see `exchange.busiest_share`.
    """
    replicas = layout.replicas
    if settings.seq_len is None and model is not None:
        positions = model.max_positions or defaults.SEQ_LEN
        settings = replace(settings, seq_len=min(defaults.SEQ_LEN, positions))
    problems: list[str] = []
    seq_len = settings.seq_len
    if seq_len is not None:
        fixed, problems = implied.implied_settings(profile, seq_len=seq_len, replicas=replicas)
        problems = [f"{profile.name}: {problem}" for problem in problems]
        problems += implied.contradictions(fixed, settings, profile)
        settings = budget.apply_implied(settings, fixed, profile.name)
    flops = 0.0
    if model is not None and seq_len is not None:
        flops = flops_per_token(model.config, model.shapes, seq_len)
        multiple = replicas * (settings.micro_batch_size or 1) if round_batch else 1
        settings = budget.fill_batch(settings, seq_len, model.num_parameters, flops, multiple)
    if not problems:  # the rules would only repeat a contradiction
        problems = budget.batch_problems(settings, replicas)
    found.problems += problems
    if model is not None and seq_len is not None and not problems:
        settings = _with_schedule(settings, seq_len, model, profile, flops, found)
        settings = _with_micro_batch(
            settings, seq_len, model, profile, found, layout, memory_bytes, rank_imbalance
        )
    found.problems += budget.schedule_problems(settings)
    return settings


def _with_schedule(
    settings: Settings,
    seq_len: int,
    model: Model,
    profile: Profile,
    flops: float,
    found: Findings,
) -> Settings:
    """Return the settings with schedule, optimizer and intervals filled in."""
    schedule = budget.batch_schedule(settings)
    fixed, problems = implied.implied_token_counts(
        profile, settings, lambda steps: budget.sequences_after(schedule, steps) * seq_len
    )
    found.problems += [f"{profile.name}: {problem}" for problem in problems]
    found.problems += beta_problems(profile, settings)
    betas = defaults.betas(profile.optimizer.kind == "lion")
    return budget.fill_remaining(
        budget.apply_implied(settings, fixed, profile.name),
        schedule,
        num_parameters=model.num_parameters,
        flops_per_token=flops,
        has_validation=bool(settings.val_data),
        json_schedules=profile.scheduler is not None
        and profile.scheduler not in implied.DEEPSPEED_SCHEDULES,
        betas=betas if takes_betas(profile) and not cycles_betas(profile) else None,
    )


def _with_micro_batch(
    settings: Settings,
    seq_len: int,
    model: Model,
    profile: Profile,
    found: Findings,
    layout: Layout,
    memory_bytes: int | None,
    rank_imbalance: float,
) -> Settings:
    """Return the settings with the micro-batch size and the loss's chunk size filled in."""
    schedule = budget.batch_schedule(settings)
    batch, accumulation = schedule.batch_sequences, profile.accumulation
    if accumulation and settings.micro_batch_size is None:
        divides = (batch // layout.replicas) % accumulation == 0 and not settings.batch_ramp_start
        micro = batch // layout.replicas // accumulation if divides else 0
    else:
        smallest = schedule.start_sequences or batch
        micro = settings.micro_batch_size or memory.fitting_micro_batch(
            smallest // layout.replicas,
            seq_len // layout.sequence,
            config=config_of_rank(model.config, layout),
            shapes=model.shapes,
            profile=profile,
            layout=layout,
            memory_bytes=memory_bytes,
            checkpointing=settings.gradient_checkpointing,
            loss_chunk_tokens=settings.loss_chunk_tokens or 0,
            kept_bytes=settings.kept_bytes(),
            compiled=settings.compile,
            rank_imbalance=rank_imbalance,
        )
    if accumulation and micro * accumulation * layout.replicas != batch:
        found.problems.append(
            f"{profile.name}: gradient_accumulation_steps: {accumulation} contradicts "
            f"{settings.where('batch_tokens')} {settings.batch_tokens}: {batch} sequences / "
            f'({layout.replicas} rank(s) x micro-batch {micro or "auto"}). Set it to "auto", '
            f"or change the batch."
        )
    micro = micro or 1
    chunk = settings.loss_chunk_tokens
    if chunk is None and layout.tensor > 1:
        chunk = 0  # AutoTP replaces the output head
    return replace(
        settings,
        micro_batch_size=micro,
        loss_chunk_tokens=loss_chunks.chunk_tokens(model.config, micro * seq_len, chunk),
    )


def resolve_ds_config(
    profile: Profile, settings: Settings, model: Model, layout: Layout
) -> Profile:
    """Return the profile to pass to `deepspeed.initialize`; the user's profile must have no
    problems.
    """
    replicas, schedule = layout.replicas, budget.batch_schedule(settings)
    steps = budget.num_steps(schedule, settings.seq_len, settings.total_tokens)
    warmup_steps = budget.num_steps(schedule, settings.seq_len, settings.warmup_tokens or 0)
    at_once = profile.zero_stage == 3 and gathers_blocks(
        profile,
        model.block_sizes,
        hidden_size=model.hidden_size,
        ranks=layout.world_size,
        compiled=settings.compile,
    )
    if layout.stages > 1:
        profile = stage_share.with_layers(profile, model, settings.seq_len, layout.stages)
    return resolve_profile(
        profile,
        settings,
        hidden_size=model.hidden_size,
        micro_batch_size=settings.micro_batch_size,
        accumulation=schedule.batch_sequences // (settings.micro_batch_size * replicas),
        replicas=replicas,
        warmup_steps=warmup_steps,
        total_steps=steps,
        gathered_block=model.block_sizes if at_once else (),
    )
