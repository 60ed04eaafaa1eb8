"""What the settings of a run are resolved to, as far as its inputs could be read.

What was left open is taken from the DeepSpeed JSON, from the model, or from a default; what is said
twice must agree. budget.py has the arithmetic, ds_config.py what the JSON decides.
"""

from dataclasses import replace
from typing import Any

from zerolm import (
    budget,
    defaults,
    ds_config,
    epoch_plan,
    loss_chunks,
    memory,
    mixture_settings,
    muon,
)
from zerolm.ds_optimizers import beta_problems, takes_betas
from zerolm.ds_resolve import resolve
from zerolm.errors import Findings
from zerolm.flops import flops_per_token
from zerolm.host_rules import Host
from zerolm.inputs import Inputs, Model
from zerolm.mixture import Mixture
from zerolm.model_rules import max_positions
from zerolm.packing import num_rows
from zerolm.parallel import part_of
from zerolm.settings import Settings
from zerolm.sources import find_source, source_names

SIZES = frozenset({"seq_len", "batch_tokens", "micro_batch_size", "total_tokens"})


def resolved_settings(
    settings: Settings, inputs: Inputs, host: Host, refused: set[str], found: Findings
) -> Settings:
    """Return the settings with what was left open filled in; what contradicts goes to `found`.

    Args:
        refused: names of settings of which nothing is known.
    """
    if refused & SIZES:
        found.problems += budget.schedule_problems(settings)
        return settings
    model, profile = inputs.model, inputs.profile
    if settings.seq_len is None and model is not None:
        positions = max_positions(model.config) or defaults.SEQ_LEN
        settings = replace(settings, seq_len=min(defaults.SEQ_LEN, positions))
    problems: list[str] = []
    if settings.seq_len is not None:
        fixed, problems = ds_config.fixed_settings(
            profile.ds_config, seq_len=settings.seq_len, world_size=profile.layout.replicas
        )
        problems = [f"{profile.name}: {problem}" for problem in problems]
        problems += ds_config.contradictions(fixed, settings, profile.name)
        found.problems += problems
        settings = budget.apply_fixed(settings, fixed, profile.name)
    flops = 0.0
    if model is not None and settings.seq_len is not None:
        flops = flops_per_token(model.config, model.shapes, settings.seq_len)
        settings = budget.fill_batch(settings, model.num_parameters, flops)
    if not problems:  # else the batch has two sizes: its own rules would only repeat it
        problems = budget.batch_problems(settings, profile.layout.replicas)
        found.problems += problems
    if model is not None and flops and not problems:
        settings = _with_schedule(settings, inputs, model, flops, found)
        settings = _with_micro_batch(settings, inputs, model, host, found)
    found.problems += budget.schedule_problems(settings)
    return settings


def _with_schedule(
    settings: Settings, inputs: Inputs, model: Model, flops: float, found: Findings
) -> Settings:
    """Return the settings with schedule, optimizer and intervals filled in."""
    name, raw = inputs.profile.name, inputs.profile.ds_config
    schedule, seq_len = budget.batch_schedule(settings), settings.seq_len
    assert seq_len is not None
    fixed, problems = ds_config.fixed_tokens(
        raw, settings, lambda steps: budget.sequences_after(schedule, steps) * seq_len
    )
    found.problems += [f"{name}: {problem}" for problem in problems]
    kind = ds_config.block(raw, "scheduler").get("type")
    found.problems += beta_problems(raw, settings, name)
    found.problems += muon.setting_problems(raw, settings)
    lion = ds_config.optimizer_type(raw).lower() == "lion"
    betas = defaults.LION_BETAS if lion else defaults.BETAS
    return budget.fill_rest(
        budget.apply_fixed(settings, fixed, name),
        schedule,
        num_parameters=model.num_parameters,
        flops_per_token=flops,
        has_validation=bool(settings.val_data),
        json_schedules=kind is not None and str(kind) not in ds_config.SCHEDULES,
        betas=betas if takes_betas(raw) else None,
    )


def _with_micro_batch(
    settings: Settings, inputs: Inputs, model: Model, host: Host, found: Findings
) -> Settings:
    """Return the settings with the micro-batch, and the chunks in which its loss is computed."""
    assert settings.seq_len is not None and settings.batch_tokens is not None
    profile, layout = inputs.profile, inputs.profile.layout
    batch = settings.batch_tokens // settings.seq_len
    accumulation = ds_config.count(profile.ds_config, "gradient_accumulation_steps")
    if accumulation and settings.micro_batch_size is None:
        whole = (batch // layout.replicas) % accumulation == 0 and not settings.batch_ramp_start
        micro = batch // layout.replicas // accumulation if whole else 0
    else:
        smallest = (settings.batch_ramp_start or settings.batch_tokens) // settings.seq_len
        micro = settings.micro_batch_size or memory.fitting_micro_batch(
            smallest // layout.replicas,
            settings.seq_len // layout.sequence,
            config=part_of(model.config, layout),
            shapes=model.shapes,
            ds=profile.ds_config,
            world_size=host.world_size,
            memory_bytes=host.device.memory_bytes,
            checkpointing=settings.gradient_checkpointing,
            loss_chunk_tokens=settings.loss_chunk_tokens or 0,
        )
    wanted = settings.loss_chunk_tokens
    if wanted is None and layout.tensor > 1:
        wanted = 0  # the head is DeepSpeed's
    if accumulation and micro * accumulation * layout.replicas != batch:
        found.problems.append(
            f"{profile.name}: gradient_accumulation_steps: {accumulation}, contradicts "
            f"{settings.where('batch_tokens')} {settings.batch_tokens}: {batch} sequences / "
            f'({layout.replicas} rank(s) x micro-batch {micro or "auto"}). Set it to "auto", '
            f"or change the batch."
        )
    return replace(
        settings,
        micro_batch_size=micro or 1,
        loss_chunk_tokens=loss_chunks.chunk_tokens(
            model.config, (micro or 1) * settings.seq_len, wanted
        ),
    )


def resolved_mixture(settings: Settings, inputs: Inputs, found: Findings) -> Mixture | None:
    """Make stages of the weights, and look how often the run would read each source.

    Args:
        settings: resolved as far as they could be.

    Returns:
        None where too little is known, of which `found` has the reason.
    """
    sources = inputs.sources.training
    if settings.seq_len is None or not inputs.all_sources or not sources:
        return None
    sizes = [num_rows(source, settings.seq_len, settings.packing) for source in sources]
    if not all(sizes):
        return None
    known = len(found.problems)
    mixture = mixture_settings.resolve(
        settings,
        inputs.sources.weights,
        lambda name: find_source(name, sources),
        sizes,
        found.problems,
    )
    if len(found.problems) > known or not (settings.total_tokens and settings.batch_tokens):
        return mixture
    if not budget.batch_problems(settings, inputs.profile.layout.replicas):
        problems, notices = epoch_plan.cap_problems(
            mixture,
            mixture.order(sizes, settings.seed),
            source_names(sources),
            budget.total_sequences(settings),
            settings,
        )
        found.problems += problems
        found.notices += notices
    return mixture


def resolved_ds_config(settings: Settings, inputs: Inputs, host: Host) -> dict[str, Any]:
    """Return the DeepSpeed JSON for `deepspeed.initialize`.

    Args:
        settings: resolved, of inputs without problems.
    """
    model, profile = inputs.model, inputs.profile
    assert settings.seq_len and settings.batch_tokens and settings.micro_batch_size
    assert settings.total_tokens and model is not None
    batch = settings.batch_tokens // settings.seq_len
    return resolve(
        profile.ds_config,
        settings,
        hidden_size=memory.hidden_size(model.config),
        micro_batch_size=settings.micro_batch_size,
        accumulation=batch // (settings.micro_batch_size * profile.layout.replicas),
        replicas=profile.layout.replicas,
        on_gpu=host.device.is_gpu,
        warmup_steps=budget.num_steps(settings, settings.warmup_tokens or 0),
        total_steps=budget.num_steps(settings, settings.total_tokens),
    )
