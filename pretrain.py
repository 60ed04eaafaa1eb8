"""Pretrain a Hugging Face causal language model with DeepSpeed ZeRO. The story of a run.

    deepspeed pretrain.py --deepspeed_config ds_configs/zero2.json \\
        --model_config model_configs/llama-160m.json --data shards/web --run_dir runs/first

Run it again with the same words and it goes on from its newest checkpoint. `--help` lists the
settings; `--check` finds every problem, without a GPU, and stops there.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerolm import allocator, distributed, preflight, restore, run_directory, stability, watchdog
from zerolm.checkpoint_directory import candidates
from zerolm.errors import EXIT_DONE, CheckpointWriteError, ConfigError, GaveUp, ZerolmError
from zerolm.optimizer import leave_untouched_values, parameter_groups
from zerolm.plan import Plan
from zerolm.run import Run

# -------------------------------------------------------------------------------------------------
# Before anything exists: every problem in the three files, the data and the machine, at once


def main(argv: list[str]) -> int:
    rank, local_rank, _ = distributed.environment_rank()
    try:
        plan = preflight.check(argv)
        distributed.meet()
        if plan.settings.check:
            if rank == 0:
                print(plan.summary())
            return EXIT_DONE
        run_dir = Path(plan.settings.run_dir or "")  # preflight requires it
        lock = run_directory.claim(run_dir) if rank == 0 else None
        if rank == 0:
            restore.if_lost(run_dir, plan.settings.upload_to)
            candidates(run_dir)  # refuses a run whose checkpoints are all lost
        distributed.meet()
    except ConfigError as error:
        return distributed.refuse(error, rank, local_rank)
    stop = stability.StopRequest(plan.settings.stop_after)  # its clock runs from here on
    dog = watchdog.Watchdog(run_dir, rank, plan.settings.hang_timeout, stop)
    try:
        code = train(plan, stop, dog)
        dog.close("done" if code == EXIT_DONE else "stopped")
        return code
    except ZerolmError as error:
        if rank == 0 or not error.on_all_ranks:
            print(f"pretrain.py: rank {rank}: {error}", file=sys.stderr, flush=True)
        if error.on_all_ranks:
            distributed.stop()
            dog.close("gave up")
        else:
            dog.failed(error)
        return error.exit_code
    except Exception as error:
        dog.failed(error)
        raise
    finally:
        if lock is not None:
            lock.close()


# -------------------------------------------------------------------------------------------------
# The run


def train(plan: Plan, stop: stability.StopRequest, dog: watchdog.Watchdog) -> int:
    """Train to the token budget, from the newest checkpoint if any. Every rank calls."""
    rank, world_size, device = distributed.start()
    if device.type == "cpu":
        allocator.keep_freed_memory()
    dog.meet(world_size)
    distributed.must_be_same(
        plan.fingerprint(),
        "settings, files, versions or devices differ from the first rank's, so the ranks would "
        "not train one model on one data order. Make the hosts alike.",
    )
    say = partial(distributed.say, rank)
    say(plan.summary())
    run = Run(plan, build_engine(plan, device, say), device, stop)
    resumed = run.begin()
    batches = run.batches()
    try:
        if resumed:
            run.evaluate_if_due()  # a kill may have come between the checkpoint and its evaluation
        while not run.finished and not run.stopping:
            run.step(batches)
            if run.due(run.settings.log_interval):
                run.report()
            if run.rung is not None and (entry := run.climb(run.rung)) is not None:
                batches = run.roll_back(batches, entry)
                continue
            if run.due(run.settings.checkpoint_interval):
                run.save()
            run.uploads.poke()
            run.page.poke()
            if run.finished or not run.stopping:  # asked to stop in its last step, it ends
                run.evaluate_if_due()
    except (GaveUp, CheckpointWriteError) as error:
        run.fail(error)
        raise
    return run.end()


# -------------------------------------------------------------------------------------------------
# The engine


def build_engine(plan: Plan, device: Any, say: Callable[..., None]) -> Any:
    """Build the model from its config, check its initial weights, and hand it to DeepSpeed."""
    # Here and not above: they take seconds to import, which --help and --check need not wait for.
    import deepspeed
    from deepspeed.utils import logger

    from zerolm import attention_kernels, chunked_head, compiled_blocks, leakage, muon, ulysses
    from zerolm import model as models

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not plan.ds_config.get("wall_clock_breakdown"):
        logger.setLevel(logging.WARNING)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision, torch.float32)
    attention = models.agreed_attention(
        plan.model_config, plan.settings.attn_implementation, device.type, dtype
    )
    torch.set_float32_matmul_precision(plan.settings.float32_matmul)
    model = models.build_model(
        plan.model_config,
        seed=plan.settings.seed,
        dtype=dtype,
        zero_stage=plan.zero_stage,
        ds_config=plan.ds_config,
        attn_implementation=attention,
        gradient_checkpointing=plan.settings.gradient_checkpointing,
        device=device,
    )
    report = models.check_initialization(model, plan.model_config)
    if report.problems:
        raise ConfigError(["the model was not initialised:", *report.problems])
    say(f"attention: {attention}")
    masked = plan.settings.document_mask
    notice = attention_kernels.plain_attention_notice(
        plan.model_config, device, dtype, document_mask=masked
    )
    if attention == "sdpa" and notice:
        say(f"note: {notice}")
    say(f"{report}; fingerprint {models.weights_fingerprint(model)}")
    buffers = models.float32_buffers(model)
    if plan.settings.loss_chunk_tokens:
        chunked_head.install(model, plan.settings.loss_chunk_tokens)
    if plan.settings.compile:
        compiled_blocks.prepare(model, plan.zero_stage)
    assert plan.settings.seq_len is not None  # preflight has resolved it
    mpu = ulysses.register(model, plan.layout, plan.micro_batch_size, plan.settings.seq_len)
    with_muon = muon.chosen(plan.ds_config)
    with muon.tagging(model) if with_muon else nullcontext():
        engine, *_ = deepspeed.initialize(
            model=model,
            mpu=mpu,
            model_parameters=parameter_groups(model, plan.weight_decay),
            config=plan.ds_config,
        )
    if with_muon:
        say(muon.shares(model))
    if plan.ds_config["optimizer"]["type"].lower() == "lion":
        leave_untouched_values(engine.optimizer.optimizer)
    models.restore_float32_buffers(engine.module, buffers)
    if plan.settings.compile:
        say(compiled_blocks.compile_blocks(engine.module))
    engine.train()
    if plan.settings.document_mask:
        say(leakage.check(engine, plan, device))
    return engine


if __name__ == "__main__":
    distributed.leave(main(sys.argv[1:]))
