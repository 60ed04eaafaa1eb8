"""A run on one rank: where it is, its steps, what becomes of an anomaly, what is said and kept.

`pretrain.py` tells the story; here is what each of its sentences does. The parts that it puts
together (data, train step, checkpoints, metrics, ...) know nothing of each other.
"""

import os
from pathlib import Path
from typing import Any

from zerolm import (
    adaptive_clip,
    checkpoint,
    compiled_blocks,
    console,
    data,
    distributed,
    epoch_plan,
    health,
    ledger,
    live_memory,
    metrics,
    mixture,
    optimizer,
    probe,
    pulse,
    reporting,
    reshard,
    rollback,
    routing,
    run_directory,
    run_record,
    stability,
    throughput,
    topology,
    tracker,
    train_step,
    ulysses,
    uploads,
)
from zerolm.checkpoint_directory import MANIFEST, Progress, Retention
from zerolm.checkpoint_writer import CheckpointWriter
from zerolm.errors import EXIT_DONE, EXIT_STOPPED, GaveUp, ZerolmError
from zerolm.evaluations import Evaluations
from zerolm.faults import fault_point
from zerolm.files import write_json
from zerolm.plan import Plan
from zerolm.refusal import StepGate
from zerolm.saves import Saves
from zerolm.spike import COOL_DOWN, History

UNBOUNDED = 1 << 62  # the stream has no end: the token budget ends the run


class Run:
    """A run on one rank: its engine, how far it is, its log. All ranks make the same calls."""

    def __init__(self, plan: Plan, engine: Any, device: Any, stop: stability.StopRequest):
        self.plan, self.run_dir = plan, Path(plan.settings.run_dir or "")
        self.settings: Any = plan.settings  # resolved: none of them is None any more
        self.engine, self.device, self.stop = engine, device, stop
        self.rank, self.world_size = engine.global_rank, engine.world_size
        peak = plan.learning_rate.peak if plan.learning_rate else 1.0
        self.ratios = train_step.learning_rate_ratios(self.engine, peak)
        self.peak_flops, source = throughput.device_peak_flops(self.device, plan.matmul_precision)
        self.say(f"peak: {self.peak_flops:.3g} FLOP/s a device ({source})")
        self.layout = plan.layout
        self.cut: dict[str, Any] = {  # how any data is cut into this rank's micro-batches
            "seq_len": self.settings.seq_len,
            "micro_batch_size": plan.micro_batch_size,
            "document_mask": self.settings.document_mask,
            "packing": self.settings.packing,
        }
        retention = Retention(self.settings.checkpoint_keep, self.settings.checkpoint_keep_tokens)
        writer = CheckpointWriter(engine, self.run_dir, retention)
        self.saves = Saves(writer, self.settings, stop, self.say)
        cut = self.cut_into(*self.layout.evaluation_share(self.rank))
        self.evaluations = Evaluations(plan, engine, device, cut, self.say)
        self.watch = throughput.Stopwatch(self.device)
        self.uploads = uploads.Uploads(
            self.run_dir, self.settings.upload_to, self.settings.upload_keep, self.rank == 0
        )
        self.page = reporting.Reporting(self.run_dir, self.settings.report_interval, self.rank == 0)
        self.console = console.Console(self.rank == 0)
        self.progress = Progress()
        self.stopping = False
        self.gate = StepGate(self.engine)
        self.ladder = stability.ladder(
            plan.settings, plan.ds_config["optimizer"]["type"], plan.precision
        )
        fixed = float(plan.ds_config.get("gradient_clipping", 0.0))
        self.clipping = adaptive_clip.Clipping(fixed, self.settings.adaptive_clip)
        self.health = health.Health(
            engine,
            device,
            interval=plan.settings.log_interval or 1,  # resolved, as all are
            clips=self.clipping.clips,
            norm_is_of_gradient=self.ladder.policy.watch_norm,
            layout=self.layout,
        )
        self.routing = routing.Routing(plan.model_config, plan.settings.log_interval or 1)
        self.changed = plan.changed
        self.trackers: tracker.Trackers | None = None  # of the log, until the next one has them
        self.stage = 0  # of the mixture
        self.said: str | None = None  # of graphs that were broken
        self.rung: str | None = None  # of the ladder, that the last step led to

    def say(self, *words: object) -> None:
        distributed.say(self.rank, *words)

    @property
    def finished(self) -> bool:
        return self.progress.tokens >= self.settings.total_tokens

    def due(self, interval: int) -> bool:
        """Tell whether something done every `interval` steps, and at the end, is done now."""
        return self.finished or self.stopping or self.progress.step % interval == 0

    def cut_into(self, part: int, parts: int) -> dict[str, Any]:
        """Return how data of which a rank has one of several parts is cut into micro-batches."""
        return self.cut | {"rank": part, "world_size": parts}

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
            optimizer.repeat_powers(self.engine.optimizer.optimizer)
            self.progress = found.progress
            self.saves.newest = str(found.directory)
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
        self.clipping.usual = adaptive_clip.Usual(**self.progress.clipping)
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
        self.evaluations.begin(self.log, step)
        for damaged in damage:
            aside = str(damaged.set_aside)
            self.log.event("damaged", step, checkpoint=aside, problems=damaged.problems)
        self.log.event(
            "resume" if found else "start",
            step,
            checkpoint=self.saves.newest,
            world_size=self.world_size,
            zero_stage=self.plan.zero_stage,
            resharded=self.plan.cut_anew(found.manifest) if found else [],
        )
        if self.changed:
            self.log.event("changed", step, changes=self.changed)
            self.changed = {}  # a rollback begins again, with nothing changed since
        self.log.track(self.settings, before=self.trackers)
        self.trackers = self.log.trackers
        self.console.begin(step, self.plan.total_steps)
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
            stages=self.plan.mixture.stages[1:],
            **self.cut_into(*self.layout.training_share(self.rank)),
        )
        self.order, self.traffic = stream.order, stream.traffic
        self._note_caps()
        reached = metrics.last_sequence(self.progress.position, self.progress.skipped_windows)
        self.stage = self.order.stage_of(reached)
        on_gpu = self.device.type != "cpu"
        loader = data.make_loader(stream, self.settings.num_workers, pin_memory=on_gpu)
        return iter(data.prefetch_to_device(loader, self.device))

    def _note_caps(self) -> None:
        """Say, as the run begins or goes on, which caps what it left out makes it exceed."""
        progress, settings = self.progress, self.settings
        left = -(-(settings.total_tokens - progress.tokens) // settings.seq_len)
        for line in epoch_plan.left_out_notices(
            self.plan.mixture,
            self.order,
            self.plan.source_names,
            progress.position + max(0, left),
            progress.skipped_windows,
            settings,
        ):
            self.say(f"note: {line}")

    def probes(self) -> Any:
        """Return the micro-batches of the fixed batch, the same on every rank."""
        same = self.cut_into(0, 1)
        count = probe.num_sequences(self.plan)
        fixed = data.ValidationStream(self.plan.sources, num_sequences=count, **same)
        return data.prefetch_to_device(data.make_loader(fixed, 0, False), self.device)

    # ---- One step

    def step(self, batches: Any) -> None:
        """Read one global batch, accumulate its gradient, and take the optimizer step."""
        progress, plan, seq_len = self.progress, self.plan, self.settings.seq_len
        sequences = plan.batch_schedule(progress.position)
        micro_steps = sequences // (plan.micro_batch_size * self.layout.replicas)
        pulse.beat("data", progress.step + 1, (progress.position, sequences))
        fault_point("step.begin", progress.step + 1)
        with self.watch.running():
            with self.watch.waiting_for_data():
                micro_batches = train_step.take(batches, micro_steps)
            own = self.layout.seeding_rank(self.rank)
            train_step.seed_step(self.settings.seed, progress.position, own)
            self.health.begin(progress.step + 1, micro_steps)
            self.routing.begin(progress.step + 1)
            fault = fault_point("step.backward", progress.step + 1)
            result = train_step.forward_backward(
                self.engine,
                [ulysses.own_part(batch, self.layout, self.rank) for batch in micro_batches],
                len(plan.sources),
                seq_len,
                self.layout,
                (float(self.stop.asked()), *self.saves.flags()),
                fault,
                self.watch.computing,
                self.health.backward,
                self.routing,
            )
            tokens = progress.tokens + sequences * seq_len
            rate = plan.learning_rate(tokens) if plan.learning_rate else None
            live_memory.record(self.engine, progress.step + 1)
            self.health.before_update()
            train_step.apply(
                self.engine,
                self.gate,
                result,
                rate,
                self.ratios,
                factor=self.ladder.factor,
                refused=self.ladder.judge_loss(result.loss),
                judge=self.ladder.judge_norm,
                clip=self.clipping.bound,
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
        progress.health = self.health.end_step(progress.health, result)
        if result.applied:
            progress.tokens = tokens
            self.clipping.end_step(result.grad_norm)
            progress.clipping = vars(self.clipping.usual)
        else:
            progress.skipped_steps += 1
        if self.ladder.reason or not result.applied:
            self.note_anomaly(sequences)
        counted = result.applied and self.layout.part(self.rank) == 0
        if counted and ledger.VARIABLE in os.environ:
            rows = (
                row
                for batch in micro_batches
                for row in zip(
                    batch["sequence_ids"].tolist(), batch["sources"].tolist(), strict=True
                )
            )
            ledger.record(progress.step, rows)
        fault_point("step.end", progress.step)
        self.console.step(progress.step)
        self.note_stage()
        self.saves.advance(result.flags[1:], self.log, last=self.finished or self.stopping)

    def note_stage(self) -> None:
        """Write down that the mixture's next stage has begun with this step."""
        progress, stages = self.progress, self.plan.mixture.stages
        last = metrics.last_sequence(progress.position, progress.skipped_windows)
        if (stage := self.order.stage_of(last)) != self.stage:
            self.stage = stage
            shares = mixture.shares(stages[stage], self.plan.source_names)
            self.log.event("stage", progress.step, stage=stage + 1, shares=shares)
            self.say(f"step={progress.step} stage={stage + 1} of {len(stages)}: {shares}")

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
        self.log.close("rollback")
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
        health_row, progress.health = self.health.row(progress.health, result)
        row = {
            "step": progress.step,
            "tokens": progress.tokens,
            **metrics.training_row(result, plan.source_names),
            **health_row,
            **self.clipping.row(result.clipped_to),
            **result.router,
            "train/batch_tokens": self.batch_tokens,
            **metrics.data_row(
                self.order,
                plan.source_names,
                progress.position,
                seq_len,
                progress.skipped_windows,
            ),
            **metrics.store_row(self.traffic),
            **throughput.slowest_rank(self.watch.own_seconds(), self.device),
            **self.watch.report(self.world_size, plan.flops_per_token, self.peak_flops),
            **throughput.memory(self.device),
            "health/skipped_steps": progress.skipped_steps,
            "health/spikes": progress.spikes,
            "health/rollbacks": progress.rollbacks,
        }
        self.log.metrics(row)
        sequences_left = -(-(self.settings.total_tokens - progress.tokens) // seq_len)
        steps_left = plan.batch_schedule.steps(
            progress.position, progress.position + sequences_left
        )
        seconds_left = steps_left * row["throughput/step_seconds"]
        if not self.console.figures(row, progress.step + steps_left, seconds_left):
            self.say(metrics.console_line(row, progress.step + steps_left, seconds_left))
        if self.settings.compile and (broken := compiled_blocks.breaks()) not in (None, self.said):
            self.said = broken
            self.say(broken)

    def save(self) -> None:
        """Copy the state of this step, from which a checkpoint is written behind training."""
        norm = self.health.parameter_norm()
        stability.refuse_weights(norm, self.progress.step, self.saves.newest)
        plan = self.plan
        self.saves.save(
            self.progress,
            self.log,
            last=self.finished or self.stopping,
            facts=lambda: {
                "optimizer": topology.optimizer_kind(plan.ds_config),
                "data_fingerprint": plan.data_fingerprint,
                "precision": plan.precision,
                "cut": topology.cut(plan.ds_config),
                "order": run_record.order_of(plan),
                "versions": self.record["versions"],
                "model_config": self.record["model_config"],
                "probe": probe.measure(self.engine, self.probes(), plan),
            },
        )

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint on its way, if there is one."""
        self.saves.finish(self.log, last=self.finished or self.stopping)

    def evaluate_if_due(self) -> None:
        """Measure what this step is to be measured by, once its checkpoint is whole."""
        self.evaluations.if_due(self.progress, self.log, self.due, self.make_safe)

    def make_safe(self) -> None:
        """Wait for the checkpoint of this step: whatever comes next, it is on disk."""
        if self.saves.step == self.progress.step:
            self.finish_checkpoint()

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
        self.console.close()
        self.log.close("done" if self.finished else "stopped")
        distributed.stop(self.engine)
        self.page.finish()  # the other ranks have ended
        self.uploads.finish(self.settings.upload_wait)
        self.log.finish_trackers()
        return EXIT_DONE if self.finished else EXIT_STOPPED

    def fail(self, error: ZerolmError) -> None:
        """Write down why all ranks end the run, and close everything."""
        if isinstance(error, GaveUp):
            self.finish_checkpoint()
        event = "gave_up" if isinstance(error, GaveUp) else "failed"
        self.log.event(event, self.progress.step, reason=str(error))
        self.console.close()
        self.log.close(event)
        self.page.finish()
        self.uploads.finish(self.settings.upload_wait)
        self.log.finish_trackers()
