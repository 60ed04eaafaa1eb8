"""Build a run's model and the DeepSpeed engine that trains it, with the changes of its features.

`build_engine` calls the other functions. Must not know data, checkpoints or the training loop.
"""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger

from zerolm.attention import choice
from zerolm.common import machine
from zerolm.common.errors import ConfigError
from zerolm.distributed import ulysses
from zerolm.distributed.pipeline import Link
from zerolm.ds_config.muon import not_matrices, transposed_shapes
from zerolm.ds_config.profile import Profile
from zerolm.engine import experts, muon
from zerolm.engine.gradient_sums import spare_memory_traffic
from zerolm.engine.kernel_fixes import fix_lion_zero_updates
from zerolm.engine.protocol import Engine
from zerolm.engine.shard_groups import sharding_within
from zerolm.engine.stages import StageGroups
from zerolm.features.feature import Feature
from zerolm.model import build, stages
from zerolm.model.architecture import num_experts, router_loss_coefficient
from zerolm.optim import custom
from zerolm.optim.parameter_groups import describe_groups, parameter_groups
from zerolm.plan.plan import Plan
from zerolm.pretrained import check as pretrained
from zerolm.pretrained import masters
from zerolm.watchdog import flight_recorder
from zerolm.watchdog.progress import record_progress


def build_engine(
    plan: Plan, wanted: Sequence[Feature], device: Any, print_rank0: Callable[..., None]
) -> Engine:
    """Build the model, check its initial weights, and return the DeepSpeed engine that trains it.

    Every rank must call this.

    Args:
        wanted: the run's features, which may change the model and the engine.

    Raises:
        ConfigError: the initial weights do not match the model config, or the attention kernel
            ignores the document mask.
    """
    settings = plan.settings
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not plan.ds.json.get("wall_clock_breakdown"):
        logger.setLevel(logging.WARNING)
    existing = pretrained.verified(plan.initial)
    if plan.layout.experts > 1:
        experts.create_groups(plan.layout.experts, plan.layout.stages)
    groups = None
    if plan.layout.stages > 1:
        groups = StageGroups(plan.layout.stages, flight_recorder.TRANSFERS)
    model = build_checked_model(plan, existing, wanted, device, print_rank0, groups)

    for feature in wanted:
        feature.change_model(model)
    buffers = build.float32_buffers(model)
    mpu = groups or ulysses.register_attention(
        model, plan.layout, settings.micro_batch_size, settings.seq_len
    )
    engine = initialize(plan, model, mpu, existing, wanted, print_rank0)

    build.restore_float32_buffers(engine.module, buffers)  # DeepSpeed has cast them
    if groups is not None:
        _link(engine, plan, groups)
    engine.train()
    for feature in wanted:
        if line := feature.change_engine(engine):
            print_rank0(line)
    return engine


def _link(engine: Engine, plan: Plan, groups: StageGroups) -> None:
    """Connect this stage with its neighbours."""
    stage, config, dtype = stages.stage_of(engine.module), plan.model.config, torch_dtype(plan.ds)
    assert stage is not None
    shape, state_dtype = stages.passed(config).state(config, dtype)
    # Of the router loss: see `MicroBatches`.
    num_counts = 1 + (num_experts(config)[0] or 0) if router_loss_coefficient(config) else 0
    stage.link = Link(
        groups.peers, groups.stage, groups.pipe, groups.transfers, shape, state_dtype,
        engine.device, lambda: record_progress("transfer"), num_counts,
    )  # fmt: skip


def build_checked_model(
    plan: Plan,
    existing: Any,
    wanted: Sequence[Feature],
    device: Any,
    print_rank0: Callable[..., None],
    stage_groups: StageGroups | None = None,
) -> Any:
    """Build the model with the same attention kernel and initial weights on every host.

    The weights do not depend on the ZeRO stage. Every rank must call this.

    Args:
        existing: weights to start from, returned by `verified`; None for random weights.
        wanted: the run's features, which may scale random weights.
        stage_groups: if the model is divided into pipeline stages, this rank's groups.

    Raises:
        ConfigError: the weights do not match the model config or the existing weights.
    """
    settings, config, profile = plan.settings, plan.model.config, plan.ds
    dtype = torch_dtype(profile)
    torch.set_float32_matmul_precision(settings.float32_matmul)
    rows: dict[str, Any] = {"seq_len": settings.seq_len, "document_mask": settings.document_mask}
    requested = settings.attn_implementation
    attention = choice.agreed_attention(config, requested, device.type, dtype, **rows)
    masked = choice.needs_mask(config, **rows)
    failed = requested == "auto" and choice.failed_kernels_notice(
        config, attention, device.type, dtype, masked=masked
    )
    print_rank0(failed or f"attention: {attention}")
    notice = choice.unfused_attention_notice(
        config, device, dtype, document_mask=settings.document_mask
    )
    if requested == "auto" and masked:
        notice = choice.dense_mask_notice(config, attention, device.type, dtype) or notice
    if attention in ("eager", "sdpa") and notice:
        print_rank0(f"note: {notice}")
    factors = {name: each for one in wanted for name, each in one.initial_factors().items()}
    if existing is not None:
        existing.weights.scale_new_rows(factors)
    model = build.build_model(
        config,
        seed=settings.seed,
        dtype=dtype,
        zero3_config=profile.json if profile.zero_stage == 3 else None,
        attn_implementation=attention,
        gradient_checkpointing=settings.gradient_checkpointing,
        device=device,
        initial=existing,
        factors=factors,
        expert_degree=plan.layout.experts,
        stage_groups=stage_groups,
        stage_layers=profile.stage_layers,
    )
    if existing is not None:
        report = pretrained.check_loaded(model, existing)
    else:
        report = build.check_initialization(model, config, factors)
    if report.problems:
        raise ConfigError(["the model was not initialised:", *report.problems])
    print_rank0(f"{report}; fingerprint {build.weights_fingerprint(model)}")
    return model


def initialize(
    plan: Plan,
    model: Any,
    mpu: Any,
    existing: Any,
    wanted: Sequence[Feature],
    print_rank0: Callable[..., None],
) -> Engine:
    """Create a model's optimizer and DeepSpeed engine; return the engine. Every rank must call
    this.

    Parameter groups set weight decay and the options that features scale; matrices for Muon are
    also tagged. DeepSpeed builds the optimizer from its JSON, unless the JSON names a class by its
    dotted path.

    Args:
        mpu: the result of `ulysses.register_attention`, or a stage's groups.
        existing: weights that the model was initialized with, or None.
        wanted: the run's features, which may scale optimizer options.
    """
    profile, weight_decay = plan.ds, plan.settings.weight_decay
    of_stage = "first stage: " if plan.layout.stages > 1 else ""
    print_rank0(of_stage + describe_groups(model, weight_decay))
    factors = {name: each for one in wanted for name, each in one.option_factors().items()}
    optimizer = None
    if custom.is_dotted(profile.optimizer.name):
        kind = custom.optimizer_class(profile.optimizer.name)
        optimizer = partial(kind, **profile.optimizer.params)
    others = not_matrices(model) if profile.uses_muon else []
    if profile.uses_muon:
        muon.scale_by_layout(transposed_shapes(model))
    else:
        muon.import_uncompiled()
    with (
        muon.leaving_to_adamw(others),
        experts.recognized(model, profile.zero_stage),
        sharding_within(plan.layout.shard_within) as across,
    ):
        groups = parameter_groups(model, weight_decay, profile.optimizer.params, factors)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, mpu=mpu, model_parameters=groups, config=profile.json
        )
    spare_memory_traffic(engine, across, machine.num_nodes(os.environ) or 1)
    dtype = torch_dtype(profile)
    if existing is not None and existing.is_rounded_to(dtype) and plan.layout.tensor == 1:
        masters.set_masters(engine, existing.weights)
    if profile.uses_muon:
        print_rank0(of_stage + muon.describe(model))
    custom.preserve_state_dtypes(engine.optimizer.optimizer)
    if profile.optimizer.kind == "lion":
        fix_lion_zero_updates(engine.optimizer.optimizer)
    return engine


def torch_dtype(profile: Profile) -> torch.dtype:
    """Return the torch dtype of the profile's weights."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(profile.precision, torch.float32)
