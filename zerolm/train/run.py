"""A run on one rank: its steps, what becomes of an anomaly, when it saves, measures and ends.

`pretrain.py` tells the story; here is what each of its sentences does. The parts that it puts
together (feed, train step, health, checkpoints, journal, ...) know nothing of each other.
"""

from typing import Any

from zerolm.checkpoint import probe, rollback
from zerolm.checkpoint.directory import Progress, Retention
from zerolm.checkpoint.writer import CheckpointWriter
from zerolm.common.errors import EXIT_DONE, EXIT_STOPPED, GaveUp, ZerolmError
from zerolm.common.faults import fault_point
from zerolm.distributed import collectives, process_group, ulysses
from zerolm.ds_config import topology
from zerolm.evaluate.evaluator import Evaluations
from zerolm.optim import adaptive_clip
from zerolm.optim.spikes import COOL_DOWN, History
from zerolm.plan.plan import Plan
from zerolm.preflight import run_record
from zerolm.tracking import report_process
from zerolm.train import evidence, health, metrics, router_metrics, run_directory, stability
from zerolm.train import step as train_step
from zerolm.train.checkpointing import Saves
from zerolm.train.data_feed import Feed
from zerolm.train.journal import Journal
from zerolm.train.resume import load_newest
from zerolm.train.step_gate import StepGate
from zerolm.upload import process
from zerolm.watchdog.progress import record_progress


class Run:
    """A run on one rank: its engine, how far it is, its journal. All ranks make the same calls."""

    def __init__(self, plan: Plan, engine: Any, device: Any, stop: stability.StopRequest):
        self.plan, self.run_dir = plan, plan.run_dir
        self.settings = plan.settings
        self.engine, self.stop, self.layout = engine, stop, plan.layout
        self.rank, self.world_size = engine.global_rank, engine.world_size
        peak = plan.learning_rate.peak if plan.learning_rate else 1.0
        self.ratios = train_step.learning_rate_ratios(self.engine, peak)
        self.journal = Journal(plan, self.rank, self.world_size, device, self.say)
        self.feed = Feed(plan, self.rank, device, self.say)
        retention = Retention(self.settings.checkpoint_keep, self.settings.checkpoint_keep_tokens)
        writer = CheckpointWriter(engine, self.run_dir, retention)
        self.saves = Saves(writer, self.settings, stop, self.say)
        cut = self.feed.cut_into(*self.layout.evaluation_shard(self.rank))
        self.evaluations = Evaluations(plan, engine, device, cut, self.say)
        self.uploads = process.Uploads(
            self.run_dir, self.settings.upload_to, self.settings.upload_keep, self.rank == 0
        )
        self.html_report = report_process.HtmlReport(
            self.run_dir, self.settings.report_interval, self.rank == 0
        )
        self.progress = Progress()
        self.stopping = False
        self.gate = StepGate(self.engine)
        self.ladder = stability.ladder(plan.settings, plan.profile)
        self.clipping = adaptive_clip.Clipping(
            plan.profile.gradient_clipping or 0.0, self.settings.adaptive_clip
        )
        self.health = health.Health(
            engine,
            device,
            interval=plan.settings.log_interval,
            clips=self.clipping.is_active,
            norm_is_of_gradient=self.ladder.policy.watch_norm,
            layout=self.layout,
        )
        self.routing = router_metrics.Routing(plan.model.config, plan.settings.log_interval)
        self.rung: str | None = None  # of the ladder, that the last step led to

    def say(self, *words: object) -> None:
        collectives.print_rank0(self.rank, *words)

    @property
    def finished(self) -> bool:
        return self.progress.tokens >= self.settings.total_tokens

    def due(self, interval: int) -> bool:
        """Tell whether something done every `interval` steps, and at the end, is done now."""
        return self.finished or self.stopping or self.progress.step % interval == 0

    def begin(self) -> bool:
        """Load the newest whole checkpoint, if any; write run.json; open the log and the trackers.

        Returns:
            Whether there was one.
        """
        self.progress, found, damage = load_newest(
            self.engine, self.plan, self.run_dir, self.progress, self.feed.probes, self.say
        )
        if found is not None:
            self.saves.newest = str(found.directory)
        self.ladder.history = History(**self.progress.history)
        self.clipping.statistics = adaptive_clip.NormStatistics(**self.progress.clipping)
        self.record = run_directory.record(self.plan)
        self.record["skipped_windows"] = self.progress.skipped_windows
        run_directory.write(self.run_dir, self.record, self.rank)
        step = self.progress.step
        self.journal.open(step)
        self.evaluations.restore(self.journal.log, step)
        resharded = self.plan.resharded(found.manifest) if found else []
        self.journal.begin(step, self.saves.newest, damage, found is not None, resharded)
        return found is not None

    def batches(self) -> Any:
        """Return the endless iterator of this rank's micro-batches, from where the run is."""
        return self.feed.batches(self.progress)

    # ---- One step

    def step(self, batches: Any) -> None:
        """Read one global batch, accumulate its gradient, and take the optimizer step."""
        progress, seq_len = self.progress, self.settings.seq_len
        sequences = self.plan.batch_schedule(progress.position)
        record_progress("data", progress.step + 1, (progress.position, sequences))
        fault_point("step.begin", progress.step + 1)
        self.batch_tokens = sequences * seq_len
        with self.journal.watch.running():
            micro_batches, result = self._train(batches, sequences)
        self.journal.watch.count(sequences, self.batch_tokens)
        self.last_step, self.stopping = result, result.flags[0] > 0
        progress.step += 1
        progress.position += sequences
        self.rung = self.ladder.end_step(
            progress.step, result.loss, result.grad_norm, result.applied
        )
        progress.history = vars(self.ladder.history)
        progress.health = self.health.end_step(progress.health, result)
        if result.applied:
            progress.tokens += self.batch_tokens
            self.clipping.end_step(result.grad_norm)
            progress.clipping = vars(self.clipping.statistics)
        else:
            progress.skipped_steps += 1
        if self.ladder.reason or not result.applied:
            progress.spikes += bool(self.ladder.reason)
            self.journal.anomaly(self.ladder, progress, result, sequences)
        if result.applied and self.layout.rank_in_replica(self.rank) == 0:
            evidence.record_sequences(progress.step, micro_batches)
        fault_point("step.end", progress.step)
        self.journal.console.step(progress.step)
        if self.feed.enters_stage(progress):
            self.journal.stage(progress.step, self.feed.stage)
        self.saves.advance(result.flags[1:], self.journal.log, last=self.finished or self.stopping)

    def _train(self, batches: Any, sequences: int) -> tuple[list[Any], train_step.StepResult]:
        """Return the micro-batches of this rank, and what a step on them came to."""
        progress, plan, watch = self.progress, self.plan, self.journal.watch
        micro_steps = sequences // (plan.settings.micro_batch_size * self.layout.replicas)
        with watch.waiting_for_data():
            micro_batches = train_step.take(batches, micro_steps)
        train_step.seed_step(self.settings.seed, progress.position, self.rank)
        self.health.begin(progress.step + 1, micro_steps)
        self.routing.begin(progress.step + 1)
        fault = fault_point("step.backward", progress.step + 1)
        result = train_step.forward_backward(
            self.engine,
            [ulysses.shard_batch(batch, self.layout, self.rank) for batch in micro_batches],
            len(plan.sources),
            self.settings.seq_len,
            self.layout,
            (float(self.stop.asked()), *self.saves.flags()),
            fault,
            watch.computing,
            self.health.backward,
            self.routing,
        )
        tokens = progress.tokens + self.batch_tokens
        rate = plan.learning_rate(tokens) if plan.learning_rate else None
        evidence.record_memory(self.engine, progress.step + 1)
        self.health.before_update()
        train_step.apply(
            self.engine,
            self.gate,
            result,
            rate,
            self.ratios,
            factor=self.ladder.factor,
            refused=self.ladder.check_loss(result.loss),
            judge=self.ladder.check_grad_norm,
            clip=self.clipping.bound,
        )
        return micro_batches, result

    # ---- When a step is an anomaly

    def climb(self, rung: str) -> rollback.Entry | None:
        """Take a rung of the ladder; return the rollback that it leads to, if it is one."""
        if rung == COOL_DOWN:
            self.journal.cooldown(self.progress.step, self.ladder.reason)
            return None
        self.finish_checkpoint()  # what is being written may be the one to go back to
        return stability.roll_back_or_give_up(
            self.ladder,
            rung,
            self.progress,
            self.settings,
            self.run_dir,
            self.plan.batch_schedule,
            self.rank,
        )

    def roll_back(self, batches: Any, entry: rollback.Entry) -> Any:
        """Go back to a checkpoint from before the spike, and leave its data out from now on.

        It is what a restart does, in the same process. Every rank must call.
        """
        batches.close()  # ends the loader's workers
        self.journal.rollback(self.progress.step, entry)
        if self.rank == 0:
            rollback.record(self.run_dir, entry)
        collectives.barrier()  # every rank reads it
        fault_point("rollback.load", entry["from_step"])
        self.begin()
        if self.rank == 0:
            rollback.remove_older(self.run_dir, entry["number"])
        return self.batches()

    # ---- What is said and kept of it

    def report(self) -> None:
        """Write the metrics of the interval to the log, the trackers and the console."""
        result, progress, names = self.last_step, self.progress, self.plan.source_names
        health_row, progress.health = self.health.row(progress.health, result)
        row = {
            "step": progress.step,
            "tokens": progress.tokens,
            **metrics.training_row(result, names),
            **health_row,
            **self.clipping.metrics(result.clipped_to),
            **result.router,
            "train/batch_tokens": self.batch_tokens,
            **metrics.data_row(
                self.feed.order,
                names,
                progress.position,
                self.settings.seq_len,
                progress.skipped_windows,
            ),
            **metrics.store_row(self.feed.traffic),
        }
        self.journal.report(progress, row)

    def save(self) -> None:
        """Copy the state of this step, from which a checkpoint is written behind training."""
        norm = self.health.parameter_norm()
        stability.refuse_weights(norm, self.progress.step, self.saves.newest)
        plan = self.plan
        self.saves.save(
            self.progress,
            self.journal.log,
            last=self.finished or self.stopping,
            facts=lambda: {
                "optimizer": topology.optimizer_kind(plan.profile),
                "data_fingerprint": plan.data_fingerprint,
                "precision": plan.profile.precision,
                "cut": topology.sharding(plan.profile),
                "order": run_record.data_order(plan),
                "versions": self.record["versions"],
                "model_config": self.record["model_config"],
                "probe": probe.measure(self.engine, self.feed.probes(), plan),
            },
        )

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint on its way, if there is one."""
        self.saves.finish(self.journal.log, last=self.finished or self.stopping)

    def evaluate_if_due(self) -> None:
        """Measure what this step is to be measured by, once its checkpoint is whole."""
        self.evaluations.run_due(self.progress, self.journal.log, self.due, self.make_safe)

    def make_safe(self) -> None:
        """Wait for the checkpoint of this step: whatever comes next, it is on disk."""
        if self.saves.step == self.progress.step:
            self.finish_checkpoint()

    def end(self) -> int:
        """Say how the run ended, close everything, and return the exit code."""
        record_progress("end")
        step, log = self.progress.step, self.journal.log
        if self.finished:
            log.event("done", step, tokens=self.progress.tokens)
            self.say(f"done: {step} steps, {self.progress.tokens} tokens, {self.run_dir}")
        else:
            reasons = collectives.gather_objects(self.stop.reason)
            reason = next(filter(None, reasons), "a request")
            log.event("stopped", step, reason=reason)
            self.say(f"stopped on request ({reason}): the same command goes on from here")
        self.journal.close("done" if self.finished else "stopped")
        process_group.destroy(self.engine)
        self._finish()  # the other ranks have ended
        return EXIT_DONE if self.finished else EXIT_STOPPED

    def fail(self, error: ZerolmError) -> None:
        """Write down why all ranks end the run, and close everything."""
        if isinstance(error, GaveUp):
            self.finish_checkpoint()
        event = "gave_up" if isinstance(error, GaveUp) else "failed"
        self.journal.log.event(event, self.progress.step, reason=str(error))
        self.journal.close(event)
        self._finish()

    def _finish(self) -> None:
        """Wait for the HTML report, the uploads and the trackers, each for a bounded time."""
        self.html_report.finish()
        self.uploads.finish(self.settings.upload_wait)
        self.journal.log.finish_trackers()
