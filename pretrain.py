"""Pretrain a Hugging Face causal language model with DeepSpeed ZeRO. The story of a run.

    deepspeed pretrain.py --deepspeed_config ds_configs/zero2.json \\
        --model_config model_configs/llama-160m.json --data shards/web --run_dir runs/first

Run it again with the same words and it goes on from its newest checkpoint. `--help` lists the
settings; `--check` finds every problem, without a GPU, and stops there.
"""

import contextlib
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from zerolm import (
    checkpoint,
    data,
    distributed,
    evaluate,
    ledger,
    metrics,
    preflight,
    probe,
    pulse,
    reshard,
    restore,
    rollback,
    run_directory,
    run_record,
    stability,
    throughput,
    topology,
    train_step,
    uploads,
    watchdog,
)
from zerolm.checkpoint_directory import (
    MANIFEST,
    Progress,
    Retention,
    candidates,
    directory_name,
)
from zerolm.checkpoint_writer import CheckpointWriter, Outcome
from zerolm.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    CheckpointWriteError,
    ConfigError,
    GaveUp,
    ZerolmError,
)
from zerolm.faults import fault_point
from zerolm.files import write_json
from zerolm.optimizer import parameter_groups
from zerolm.preflight import Plan
from zerolm.refusal import StepGate
from zerolm.spike import COOL_DOWN, History

UNBOUNDED = 1 << 62  # the stream has no end: the token budget ends the run


# -------------------------------------------------------------------------------------------------
# Before anything exists: every problem in the three files, the data and the machine, at once


def main(argv: list[str]) -> int:
    rank, local_rank, _ = distributed.environment_rank()
    try:
        plan = preflight.check(argv)
        if plan.settings.check:
            if rank == 0:
                print(plan.summary())
            return EXIT_DONE
        run_dir = Path(plan.settings.run_dir or "")  # preflight requires it
        lock = run_directory.claim(run_dir) if rank == 0 else None
        if rank == 0:
            restore.if_lost(run_dir, plan.settings.upload_to)
            candidates(run_dir)  # refuses a run whose checkpoints are all lost
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
    run = Run(plan, stop, dog)
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
            if not run.stopping:
                run.evaluate_if_due()
    except GaveUp as error:
        run.finish_checkpoint()
        run.log.event("gave_up", run.progress.step, reason=str(error))
        run.log.close()
        run.uploads.finish(run.settings.upload_wait)
        raise
    return run.end()


class Run:
    """A run on one rank: its engine, how far it is, its log. All ranks make the same calls."""

    def __init__(self, plan: Plan, stop: stability.StopRequest, dog: watchdog.Watchdog):
        self.plan, self.run_dir = plan, Path(plan.settings.run_dir or "")
        self.settings: Any = plan.settings  # resolved: none of them is None any more
        self.stop = stop
        self.rank, self.world_size, self.device = distributed.start()
        dog.meet(self.world_size)
        distributed.must_be_same(
            plan.fingerprint(),
            "settings, files, versions or devices differ from the first rank's, so the ranks would "
            "not train one model on one data order. Make the hosts alike.",
        )
        self.say(plan.summary())
        self.engine = build_engine(plan, self.device, self.say)
        peak = plan.learning_rate.peak if plan.learning_rate else 1.0
        self.ratios = train_step.learning_rate_ratios(self.engine, peak)
        self.peak_flops, source = throughput.device_peak_flops(self.device, plan.compute_precision)
        self.say(f"peak: {self.peak_flops:.3g} FLOP/s a device ({source})")
        self.cut: dict[str, Any] = {  # how any data is cut into this rank's micro-batches
            "seq_len": self.settings.seq_len,
            "micro_batch_size": plan.micro_batch_size,
            "rank": self.rank,
            "world_size": self.world_size,
            "document_mask": self.settings.document_mask,
        }
        self.writer = CheckpointWriter(
            self.engine,
            self.run_dir,
            Retention(self.settings.checkpoint_keep, self.settings.checkpoint_keep_tokens),
        )
        self.failed_saves = 0
        self.watch = throughput.Stopwatch(self.device)
        self.uploads = uploads.Uploads(
            self.run_dir, self.settings.upload_to, self.settings.upload_keep, self.rank == 0
        )
        self.progress = Progress()
        self.stopping = False
        self.gate = StepGate(self.engine)
        self.ladder = stability.ladder(
            plan.settings, plan.ds_config["optimizer"]["type"], plan.precision
        )
        self.changed = plan.changed
        self.rung: str | None = None  # of the ladder, that the last step led to
        self.newest_checkpoint: str | None = None

    def say(self, *words: object) -> None:
        if self.rank == 0:
            with contextlib.suppress(BrokenPipeError):  # whoever read it is gone: not the run's end
                print(*words, flush=True)

    @property
    def finished(self) -> bool:
        return self.progress.tokens >= self.settings.total_tokens

    def due(self, interval: int) -> bool:
        """Tell whether something done every `interval` steps, and at the end, is done now."""
        return self.finished or self.stopping or self.progress.step % interval == 0

    # ---- Where the run is

    def begin(self) -> bool:
        """Load the newest whole checkpoint, if any; write run.json; open the log and the trackers.

        Returns:
            Whether there was one.
        """
        rollbacks = distributed.broadcast_object(rollback.entries(self.run_dir))
        pulse.beat("load")
        if self.rank == 0:  # now that the lock is held
            for entry in rollbacks:
                metrics.archive(self.run_dir, entry["number"], entry["to_step"])
            rollback.settle(self.run_dir)
        found, damage = checkpoint.newest_whole(self.run_dir, self.rank, self.world_size)
        for damaged in damage:
            self.say(f"damaged: {damaged.directory}, now {damaged.set_aside}", *damaged.problems)
        if found is not None:
            checkpoint.load(self.engine, found, self.plan, reshard.load)
            self.progress = found.progress
            self.newest_checkpoint = str(found.directory)
            self.say(f"resume: {found.directory}, step {self.progress.step}")
            where = found.directory / MANIFEST
            seen = probe.check(self.engine, self.probes(), self.plan, found.manifest, where)
            self.say(f"probe loss: {seen}")
        self.progress = rollback.carried_over(self.progress, rollbacks)
        if found is not None:
            new = run_record.order_of(self.plan)
            old = found.manifest.get("order", new)
            self.progress = run_record.carried(self.progress, old, new)
        self.ladder.history = History(**self.progress.history)
        self.record = run_directory.record(self.plan)
        self.record["skipped_windows"] = self.progress.skipped_windows
        if self.rank == 0:
            write_json(self.run_dir / run_directory.RECORD, self.record)
        distributed.barrier()  # rank 0 has written
        distributed.agree(
            (self.run_dir / run_directory.RECORD).is_file(),
            f"--run_dir {self.run_dir}: not every node sees it. "
            f"Use a file system that all nodes share.",
        )
        step = self.progress.step
        self.log = metrics.RunLog(self.run_dir, step, writes=self.rank == 0)
        for damaged in damage:
            aside = str(damaged.set_aside)
            self.log.event("damaged", step, checkpoint=aside, problems=damaged.problems)
        self.log.event(
            "resume" if found else "start",
            step,
            checkpoint=self.newest_checkpoint,
            world_size=self.world_size,
            zero_stage=self.plan.zero_stage,
            resharded=self.plan.cut_anew(found.manifest) if found else [],
        )
        if self.changed:
            self.log.event("changed", step, changes=self.changed)
            self.changed = {}  # a rollback begins again, with nothing changed since
        tracked = self.log.track(self.settings, self.record, step, self.progress.rollbacks)
        self.say(f"wandb: {tracked}")
        return found is not None

    def batches(self) -> Any:
        """Return the endless iterator of this rank's micro-batches, from where the run is."""
        stream = data.TokenStream(
            self.plan.sources,
            self.plan.weights,
            seed=self.settings.seed,
            batch_schedule=self.plan.batch_schedule,
            position=self.progress.position,
            end_position=UNBOUNDED,
            skipped_windows=self.progress.skipped_windows,
            **self.cut,
        )
        self.order = stream.order
        on_gpu = self.device.type != "cpu"
        loader = data.make_loader(stream, self.settings.num_workers, pin_memory=on_gpu)
        return iter(data.prefetch_to_device(loader, self.device))

    def probes(self) -> Any:
        """Return the micro-batches of the fixed batch, the same on every rank."""
        same = {**self.cut, "rank": 0, "world_size": 1}
        count = probe.num_sequences(self.plan)
        fixed = data.ValidationStream(self.plan.sources, num_sequences=count, **same)
        return data.prefetch_to_device(data.make_loader(fixed, 0, False), self.device)

    # ---- One step

    def step(self, batches: Any) -> None:
        """Read one global batch, accumulate its gradient, and take the optimizer step."""
        progress, plan, seq_len = self.progress, self.plan, self.settings.seq_len
        sequences = plan.batch_schedule(progress.position)
        micro_steps = sequences // (plan.micro_batch_size * self.world_size)
        pulse.beat("data", progress.step + 1, (progress.position, sequences))
        fault_point("step.begin", progress.step + 1)
        with self.watch.running():
            with self.watch.waiting_for_data():
                micro_batches = train_step.take(batches, micro_steps)
            train_step.seed_step(self.settings.seed, progress.position, self.rank)
            fault = fault_point("step.backward", progress.step + 1)
            result = train_step.forward_backward(
                self.engine,
                micro_batches,
                len(plan.sources),
                seq_len,
                (float(self.stop.asked()), *self.writer.flags()),
                fault,
                self.watch.computing,
            )
            tokens = progress.tokens + sequences * seq_len
            rate = plan.learning_rate(tokens) if plan.learning_rate else None
            train_step.apply(
                self.engine,
                self.gate,
                result,
                rate,
                self.ratios,
                factor=self.ladder.factor,
                refused=self.ladder.judge_loss(result.loss),
                judge=self.ladder.judge_norm,
            )
        self.batch_tokens = sequences * seq_len
        self.watch.count(sequences, self.batch_tokens)
        self.last_step, self.stopping = result, result.flags[0] > 0
        progress.step += 1
        progress.position += sequences
        self.rung = self.ladder.end_step(
            progress.step, result.loss, result.grad_norm, result.applied
        )
        progress.history = vars(self.ladder.history)
        if result.applied:
            progress.tokens = tokens
        else:
            progress.skipped_steps += 1
        if self.ladder.reason or not result.applied:
            self.note_anomaly(sequences)
        if result.applied and ledger.VARIABLE in os.environ:
            ids = (number for batch in micro_batches for number in batch["sequence_ids"].tolist())
            ledger.record(progress.step, ids)
        fault_point("step.end", progress.step)
        self.note_checkpoint(self.writer.advance(result.flags[1:]))

    # ---- When a step is an anomaly

    def note_anomaly(self, sequences: int) -> None:
        """Write down a step that was an anomaly, or was not taken, and the data that it saw."""
        progress, result = self.progress, self.last_step
        saw = stability.what_was_seen(self.ladder, progress, result, sequences)
        if self.ladder.reason:
            progress.spikes += 1
            self.log.event("spike", progress.step, **saw)
            self.say(f"step={progress.step} spike: {self.ladder.reason}")
        if not result.applied:
            self.log.event("step_skipped", progress.step, **saw)

    def climb(self, rung: str) -> rollback.Entry | None:
        """Take a rung of the ladder; return the rollback that it leads to, if it is one."""
        progress, settings = self.progress, self.settings
        if rung == COOL_DOWN:
            what = {"factor": settings.cooldown_factor, "steps": settings.cooldown_steps}
            self.log.event("cooldown", progress.step, reason=self.ladder.reason, **what)
            self.say(f"step={progress.step} cooldown: {what}")
            return None
        self.finish_checkpoint()  # what is being written may be the one to go back to
        return stability.roll_back_or_give_up(
            self.ladder, rung, progress, settings, self.run_dir, self.plan.batch_schedule, self.rank
        )

    def roll_back(self, batches: Any, entry: rollback.Entry) -> Any:
        """Go back to a checkpoint from before the spike, and leave its data out from now on.

        It is what a restart does, in the same process. Every rank must call.
        """
        batches.close()  # ends the loader's workers
        self.log.event("rollback", self.progress.step, **entry)
        self.say(
            f"step={entry['from_step']} rollback: to {entry['checkpoint']}, sequences "
            f"{entry['skipped_window']} are left out: {entry['reason']}"
        )
        self.log.close()
        if self.rank == 0:
            rollback.record(self.run_dir, entry)
        distributed.barrier()  # every rank reads it
        fault_point("rollback.load", entry["from_step"])
        self.begin()
        if self.rank == 0:
            rollback.forget(self.run_dir, entry["number"])
        return self.batches()

    # ---- What is said and kept of it

    def report(self) -> None:
        """Write the metrics of the interval to the log, the tracker and the console."""
        result, progress, plan = self.last_step, self.progress, self.plan
        seq_len = self.settings.seq_len
        norm = throughput.parameter_norm(self.engine.module, self.device)
        row = {
            "step": progress.step,
            "tokens": progress.tokens,
            **metrics.training_row(result, plan.source_names),
            "train/batch_tokens": self.batch_tokens,
            **metrics.data_row(
                self.order,
                plan.source_names,
                progress.position,
                seq_len,
                progress.skipped_windows,
            ),
            **throughput.slowest_rank(self.watch.own_seconds(), self.device),
            **self.watch.report(self.world_size, plan.flops_per_token, self.peak_flops),
            **throughput.memory(self.device),
            "health/skipped_steps": progress.skipped_steps,
            "health/spikes": progress.spikes,
            "health/rollbacks": progress.rollbacks,
        }
        if norm is not None:
            row["train/param_norm"] = norm
        self.log.metrics(row)
        sequences_left = -(-(self.settings.total_tokens - progress.tokens) // seq_len)
        steps_left = plan.batch_schedule.steps(
            progress.position, progress.position + sequences_left
        )
        seconds_left = steps_left * row["throughput/step_seconds"]
        self.say(metrics.console_line(row, progress.step + steps_left, seconds_left))

    def save(self) -> None:
        """Copy the state of this step, from which a checkpoint is written behind training."""
        pulse.beat("checkpoint")
        norm = throughput.parameter_norm(self.engine.module, self.device)
        stability.refuse_weights(norm, self.progress.step, self.newest_checkpoint)
        began = time.perf_counter()
        if self.writer.busy:
            self.say(f"step={self.progress.step} waits for the checkpoint before")
            self.finish_checkpoint()
        waited = time.perf_counter() - began
        self.log.sync()
        progress = self.progress
        best = self.log.best_steps("eval/loss", self.settings.checkpoint_keep_best)
        copied = self.writer.save(
            progress,
            best=[directory_name(step) for step in best],
            optimizer=topology.optimizer_kind(self.plan.ds_config),
            data_fingerprint=self.plan.data_fingerprint,
            precision=self.plan.precision,
            cut=topology.cut(self.plan.ds_config),
            order=run_record.order_of(self.plan),
            versions=self.record["versions"],
            model_config=self.record["model_config"],
            probe=probe.measure(self.engine, self.probes(), self.plan),
        )
        if not self.settings.async_checkpoint or self.finished or self.stopping:
            self.finish_checkpoint()
        row = {"checkpoint/stall_seconds": time.perf_counter() - began}
        row |= {"checkpoint/wait_seconds": waited, "checkpoint/copy_seconds": copied}
        self.log.metrics({"step": progress.step, "tokens": progress.tokens, **row})

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint on its way, if there is one."""
        pulse.beat("checkpoint")
        self.note_checkpoint(self.writer.finish())

    def note_checkpoint(self, outcome: Outcome | None) -> None:
        """Say what became of a checkpoint, and end the run if too many failed in a row.

        Raises:
            CheckpointWriteError: on every rank.
        """
        if outcome is None:
            return
        step, name = outcome.progress.step, outcome.name
        if outcome.error is None:
            self.failed_saves, self.newest_checkpoint = 0, str(self.writer.checkpoints / name)
            self.stop.saved(outcome.seconds)
            took = {"copy_seconds": outcome.copy_seconds, "seconds": outcome.seconds}
            self.log.event("checkpoint", step, checkpoint=name, **took)
            shown = " ".join(f"{key}={value:.2f}" for key, value in took.items())
            self.say(f"step={step} checkpoint={name} {shown}")
            return
        self.failed_saves += 1
        self.log.event("checkpoint_failed", step, checkpoint=name, error=outcome.error)
        self.say(f"step={step} checkpoint={name} FAILED: {outcome.error}")
        last = self.finished or self.stopping
        if last or self.failed_saves >= self.settings.checkpoint_failures:
            raise CheckpointWriteError(
                f"{self.writer.checkpoints}: {name} could not be written: {outcome.error}. The "
                f"last whole one is {self.newest_checkpoint}. Make room, and start the same "
                f"command again."
            )

    def evaluate_if_due(self) -> None:
        """Measure the validation loss, if this step has one and does not have it yet."""
        progress, plan = self.progress, self.plan
        if not plan.val_sources or not self.due(self.settings.eval_interval):
            return
        if distributed.broadcast_object(self.log.has(progress.step, "eval/loss")):
            return
        if self.writer.step == progress.step:
            self.finish_checkpoint()  # whatever evaluating does, this step is safe before
        held_out = data.ValidationStream(
            plan.val_sources, num_sequences=plan.val_sequences, **self.cut
        )
        loader = data.make_loader(held_out, 0, False)
        batches = pulse.each("evaluate", data.prefetch_to_device(loader, self.device))
        row = evaluate.validation_loss(self.engine, batches, plan.val_source_names)
        self.log.metrics({"step": progress.step, "tokens": progress.tokens, **row})
        self.say(
            f"step={progress.step} eval_loss={row['eval/loss']:.4f} "
            f"eval_perplexity={row['eval/perplexity']:.2f}"
        )

    def end(self) -> int:
        """Say how the run ended, close everything, and return the exit code."""
        pulse.beat("end")
        step = self.progress.step
        if self.finished:
            self.log.event("done", step, tokens=self.progress.tokens)
            self.say(f"done: {step} steps, {self.progress.tokens} tokens, {self.run_dir}")
        else:
            reasons = distributed.gather_objects(self.stop.reason)
            reason = next(filter(None, reasons), "a request")
            self.log.event("stopped", step, reason=reason)
            self.say(f"stopped on request ({reason}): the same command goes on from here")
        self.log.close()
        distributed.stop(self.engine)
        self.uploads.finish(self.settings.upload_wait)  # the other ranks have ended
        return EXIT_DONE if self.finished else EXIT_STOPPED


# -------------------------------------------------------------------------------------------------
# The engine


def build_engine(plan: Plan, device: Any, say: Any) -> Any:
    """Build the model from its config, check its initial weights, and hand it to DeepSpeed."""
    # Here and not above: they take seconds to import, which --help and --check need not wait for.
    import deepspeed
    from deepspeed.utils import logger

    from zerolm import model as models

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not plan.ds_config.get("wall_clock_breakdown"):
        logger.setLevel(logging.WARNING)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision, torch.float32)
    attention = models.agreed_attention(
        plan.model_config, plan.settings.attn_implementation, device.type, dtype
    )
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
    say(f"{report}; fingerprint {models.weights_fingerprint(model)}")
    buffers = models.float32_buffers(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, plan.weight_decay),
        config=plan.ds_config,
    )
    models.restore_float32_buffers(engine.module, buffers)
    if plan.settings.compile:
        engine.compile()
    engine.train()
    return engine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
