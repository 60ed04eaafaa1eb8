"""Pretrain a Hugging Face causal language model with DeepSpeed ZeRO.

    deepspeed pretrain.py --deepspeed_config ds_configs/zero2.json \\
        --model_config model_configs/llama-160m.json --data shards/web --run_dir runs/first

Running the same command again resumes the run from its newest complete checkpoint. `--help` and
`--help all` list the flags. `--check` reports every problem and exits; it needs no GPU.

Every rank runs `main`, which checks everything before it creates the process group. `train` is the
training loop; `zerolm.train.engine_building` builds the model and passes it to DeepSpeed.
"""

import os
import sys

from zerolm.train.before_imports import become_rank, prepare_host

if __name__ == "__main__":
    become_rank(os.environ)
    from zerolm.parts import parse

    parse.answer(sys.argv[1:])  # answer --help and --version before the slow imports
    prepare_host(os.environ)
    from zerolm.train import check_only

    if check_only.is_wanted(sys.argv[1:], os.environ):
        check_only.end(sys.argv[1:])

from functools import partial

from zerolm import features
from zerolm.checkpoint import branch
from zerolm.checkpoint.directory import candidates
from zerolm.common import machine
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
    stage = plan.layout.stage_of(rank)
    dog = watchdog.Watchdog(run_dir, rank, plan.settings.hang_timeout, stop, stage)
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
    precision, name = collectives.broadcast_object((plan.ds.precision, plan.device_name))
    collectives.require_on_all_ranks(
        plan.ds.precision == precision,
        f"{plan.ds.name}: would train in {plan.ds.precision} on {plan.device_name}, but "
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
    from zerolm.train.engine_building import build_engine  # takes seconds, and --check needs none

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


if __name__ == "__main__":
    process_group.exit_process(main(sys.argv[1:]))
