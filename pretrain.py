"""Pretrain a Hugging Face causal language model with DeepSpeed ZeRO.

    deepspeed pretrain.py --deepspeed_config ds_configs/zero2.json \\
        --model_config model_configs/llama-160m.json --data shards/web --run_dir runs/first

Running the same command again resumes the run from its newest complete checkpoint. `--help` and
`--help all` list the flags. `--check` reports every problem and exits; it needs no GPU.

Every rank runs `main`, which checks everything before it creates the process group. `train` is the
training loop; `build_engine` builds the model and passes it to DeepSpeed.
"""

import os
import sys

from zerolm.common import interrupts

if __name__ == "__main__":
    interrupts.end_on_interrupt()

from zerolm.common import machine, shipped
from zerolm.distributed import ranks
from zerolm.parts import parse

if __name__ == "__main__":
    parse.answer(sys.argv[1:])  # answer --help and --version before the slow imports
    shipped.shield(os.environ)
    ranks.adopt(os.environ)
    machine.share_cores(os.environ)
    machine.keep_operators(os.environ)

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from zerolm import features
from zerolm.checkpoint import branch
from zerolm.checkpoint.directory import candidates
from zerolm.common.command_line import open_standard_streams, refuse_line_breaks
from zerolm.common.errors import (
    EXIT_DONE,
    CheckpointWriteError,
    ConfigError,
    CorruptionError,
    GaveUp,
    ZerolmError,
)
from zerolm.common.secrets import mask_tracebacks
from zerolm.data.loader import require_complete_files
from zerolm.distributed import collectives, process_group
from zerolm.ds_config.profile import Profile
from zerolm.engine.gradient_sums import spare_memory_traffic
from zerolm.engine.kernel_fixes import fix_lion_zero_updates
from zerolm.engine.protocol import Engine
from zerolm.features.feature import Feature
from zerolm.optim import custom
from zerolm.optim.parameter_groups import describe_groups, parameter_groups
from zerolm.plan.duration import with_duration
from zerolm.plan.plan import Plan
from zerolm.preflight import check
from zerolm.tracking import console_log
from zerolm.train import ending, recovery, resume, run_directory, stability
from zerolm.train.run import Run
from zerolm.upload import restore
from zerolm.watchdog import limits, startup, watchdog

# -------------------------------------------------------------------------------------------------
# Preflight: report all problems with the configs, data and machine at once; then train


def main(argv: list[str]) -> int:
    """Check the command line, train, and return the exit code."""
    startup.mark("imports")
    open_standard_streams()
    mask_tracebacks()
    limits.raise_file_limit()
    rank, local_rank, _ = process_group.environment_rank()
    try:
        refuse_line_breaks(argv)
        plan = check.check(argv)
        process_group.rendezvous()
        if plan.settings.check:
            if rank == 0:
                collectives.print_safely(with_duration(plan).summary())
            return EXIT_DONE
        run_dir = plan.run_dir
        lock = run_directory.claim(run_dir) if rank == 0 else None
        if rank == 0:
            restore.if_lost(run_dir, plan.settings.upload_to)
            branch.begin(plan, partial(run_directory.record, plan), print)
            candidates(run_dir)  # raises if the run has checkpoints but none is complete
        process_group.rendezvous()
    except (ConfigError, OSError) as error:
        return process_group.report_config_error(limits.refusal(error), rank, local_rank)
    startup.mark("checks")
    limits.drop_unwritable_output()
    if rank == 0:
        console_log.keep(run_dir)
    stop = stability.StopRequest(plan.settings.stop_after)  # its clock starts here
    dog = watchdog.Watchdog(run_dir, rank, plan.settings.hang_timeout, stop)
    try:
        code = train(plan, stop, dog)
        dog.close("done" if code == EXIT_DONE else "stopped")
        return code
    except ZerolmError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"pretrain.py: rank {rank}: {error}", file=sys.stderr, flush=True)
        if error.on_all_ranks:
            process_group.destroy()
            dog.close("gave up")
        else:
            dog.report_failure(error)
        return error.exit_code
    except Exception as error:
        dog.report_failure(error)
        if (cause := limits.explain(error)) is None:
            raise
        where, trace = f"rank {rank} on {dog.heartbeats.host}", dog.files.stacks(rank)
        print(f"pretrain.py: {where}: {cause} Traceback: {trace}", file=sys.stderr, flush=True)
        return ZerolmError.exit_code
    finally:
        if lock is not None:
            lock.release()


# -------------------------------------------------------------------------------------------------
# The training loop


def train(plan: Plan, stop: stability.StopRequest, dog: watchdog.Watchdog) -> int:
    """Train to the token budget, from the newest checkpoint if there is one.

    Every rank must call this. Returns the exit code.
    """
    rank, world_size, device = process_group.init()
    if device.type == "cpu":
        machine.keep_freed_memory()
    dog.connect(world_size)
    precision, name = collectives.broadcast_object((plan.profile.precision, plan.device_name))
    collectives.require_on_all_ranks(
        plan.profile.precision == precision,
        f"{plan.profile.name}: would train in {plan.profile.precision} on {plan.device_name}, but "
        f"in {precision} on rank 0's {name}. Choose one precision for all ranks: --precision "
        f"{precision}.",
    )
    collectives.require_same_on_all_ranks(
        plan.fingerprint(),
        "settings, files, versions or devices differ from those of rank 0, so the ranks would "
        "train different models or read different data. Make the hosts identical.",
    )
    startup.mark("connection")
    print_rank0 = partial(collectives.print_rank0, rank)
    print_rank0(plan.summary())
    wanted = features.build(plan)
    run = Run(plan, build_engine(plan, wanted, device, print_rank0), wanted, device, stop)
    startup.mark("model")
    resumed = resume.start(run)
    startup.mark("states")
    batches = run.batches()
    try:
        if resumed:
            run.evaluate_if_due()  # the run may have ended between a checkpoint and its evaluation
        while not run.finished and not run.stopping:
            run.step(batches)
            run.journal.log_startup(run.progress.step, dog.runner)
            if run.due(run.settings.log_interval):
                run.report()
            if (rollback := recovery.plan_rollback(run)) is not None:
                batches = recovery.roll_back(run, batches, rollback)
                continue
            run.save_if_due()
            run.uploads.tick()
            run.html_report.tick()
            # To stop sooner after a stop request, leave the evaluation to the resumed run.
            if run.finished or not run.stopping:
                run.evaluate_if_due()
    except (GaveUp, CheckpointWriteError, CorruptionError) as error:
        ending.fail(run, error)
        raise
    except RuntimeError as error:
        require_complete_files(error, [*plan.sources, *plan.val_sources])
        raise
    return ending.end(run)


# -------------------------------------------------------------------------------------------------
# The model and the DeepSpeed engine


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
    # Imported here and below so --check need not wait seconds for these imports.
    from deepspeed.utils import logger

    from zerolm.distributed import ulysses
    from zerolm.model import build
    from zerolm.pretrained import check as pretrained

    settings = plan.settings
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not plan.profile.json.get("wall_clock_breakdown"):
        logger.setLevel(logging.WARNING)
    existing = pretrained.verified(plan.initial)
    model = build_checked_model(plan, existing, wanted, device, print_rank0)

    for feature in wanted:
        feature.change_model(model)
    buffers = build.float32_buffers(model)
    mpu = ulysses.register_attention(
        model, plan.layout, settings.micro_batch_size, settings.seq_len
    )
    engine = initialize(plan, model, mpu, existing, wanted, print_rank0)

    build.restore_float32_buffers(engine.module, buffers)  # DeepSpeed has cast them
    engine.train()
    for feature in wanted:
        if line := feature.change_engine(engine):
            print_rank0(line)
    return engine


def build_checked_model(
    plan: Plan,
    existing: Any,
    wanted: Sequence[Feature],
    device: Any,
    print_rank0: Callable[..., None],
) -> Any:
    """Build the model with the same attention kernel and initial weights on every host.

    The weights do not depend on the ZeRO stage. Every rank must call this.

    Args:
        existing: weights to start from, returned by `verified`; None for random weights.
        wanted: the run's features, which may scale random weights.

    Raises:
        ConfigError: the weights do not match the model config or the existing weights.
    """
    from zerolm.attention import choice
    from zerolm.model import build
    from zerolm.pretrained import check as pretrained

    settings, config, profile = plan.settings, plan.model.config, plan.profile
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
        mpu: the result of `ulysses.register_attention`.
        existing: weights that the model was initialized with, or None.
        wanted: the run's features, which may scale optimizer options.
    """
    import deepspeed

    from zerolm.ds_config.muon import not_matrices
    from zerolm.engine import muon
    from zerolm.engine.shard_groups import sharding_within
    from zerolm.pretrained import masters

    profile, weight_decay = plan.profile, plan.settings.weight_decay
    print_rank0(describe_groups(model, weight_decay))
    factors = {name: each for one in wanted for name, each in one.option_factors().items()}
    optimizer = None
    if custom.is_dotted(profile.optimizer.name):
        kind = custom.optimizer_class(profile.optimizer.name)
        optimizer = partial(kind, **profile.optimizer.params)
    others = not_matrices(model) if profile.uses_muon else []
    with muon.leaving_to_adamw(others), sharding_within(plan.layout.shard_within) as across:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            mpu=mpu,
            model_parameters=parameter_groups(
                model, weight_decay, profile.optimizer.params, factors
            ),
            config=profile.json,
        )
    spare_memory_traffic(engine, across, machine.num_nodes(os.environ) or 1)
    dtype = torch_dtype(profile)
    if existing is not None and existing.is_rounded_to(dtype) and plan.layout.tensor == 1:
        masters.set_masters(engine, existing.weights)
    if profile.uses_muon:
        print_rank0(muon.describe(model))
    if profile.optimizer.kind == "lion":
        fix_lion_zero_updates(engine.optimizer.optimizer)
    return engine


def torch_dtype(profile: Profile) -> torch.dtype:
    """Return the torch dtype of the profile's weights."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(profile.precision, torch.float32)


if __name__ == "__main__":
    process_group.exit_process(main(sys.argv[1:]))
