"""`Run`: the methods that the training loop of pretrain.py calls, on one rank.

It connects data feed, step, spike guard, checkpointing, evaluations, journal and more, which do not
know each other.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from zerolm.checkpoint import memory, probe, rollback
from zerolm.checkpoint.directory import Checkpoint, published_checkpoints
from zerolm.checkpoint.manifest import Progress
from zerolm.checkpoint.rotation import Retention
from zerolm.checkpoint.writer import CheckpointWriter
from zerolm.common.errors import EXIT_DONE, EXIT_STOPPED, CorruptionError, GaveUp, ZerolmError
from zerolm.common.faults import fault_point
from zerolm.common.run_files import RunFiles
from zerolm.config.run_records import Rollback, read_rollbacks
from zerolm.distributed import collectives, process_group, ulysses
from zerolm.ds_config import topology
from zerolm.evaluate.evaluator import Evaluations
from zerolm.integrity.checks import Integrity, Watch
from zerolm.model.attention_logits import AttentionLogits, attention_layers
from zerolm.optim import adaptive_clip, ema
from zerolm.optim.qk_clip import QkClip
from zerolm.optim.spikes import COOL_DOWN, History
from zerolm.plan.plan import Plan
from zerolm.preflight import run_record
from zerolm.tracking import report_process
from zerolm.train import health, instrumentation, metrics, run_directory, stability
from zerolm.train import step as train_step
from zerolm.train.checkpointing import Checkpointing
from zerolm.train.data_feed import DataFeed
from zerolm.train.journal import Journal
from zerolm.train.profiling import StepProfiler
from zerolm.train.resume import continued, load_newest
from zerolm.train.routing import Routing
from zerolm.train.step_gate import StepGate
from zerolm.upload import process
from zerolm.watchdog.progress import record_progress


class Run:
    """A run on one rank: its engine, its progress and its logs. Every rank makes the same calls.

    Args:
        plan: of the run.
        engine: the DeepSpeed engine.
        device: of this rank.
        stop: requests to save and stop.

    Attributes:
        progress: how far the run is, as saved in checkpoints.
        stopping: whether the ranks have agreed to save and stop.
    """

    def __init__(self, plan: Plan, engine: Any, device: Any, stop: stability.StopRequest):
        self.plan, self.run_dir = plan, plan.run_dir
        self.settings = plan.settings
        self.engine, self.stop, self.layout = engine, stop, plan.layout
        self.rank, self.world_size = engine.global_rank, engine.world_size
        peak = plan.learning_rate.peak if plan.learning_rate else 1.0
        self.rate_ratios = train_step.learning_rate_ratios(self.engine, peak)
        self.journal = Journal(plan, self.rank, self.world_size, device, self.print_rank0)
        self.feed = DataFeed(plan, self.rank, device, self.print_rank0)
        retention = Retention(
            self.settings.checkpoint_keep,
            self.settings.checkpoint_keep_tokens,
            self.settings.checkpoint_keep_best,
        )
        writer = CheckpointWriter(
            engine, self.run_dir, retention, read_back=self.settings.checkpoint_read_back
        )
        self.copies = memory.connect(
            self.run_dir,
            self.rank,
            engine.checkpoint_mp_rank,
            wanted=self.settings.memory_checkpoint_interval > 0,
        )
        self.checkpointing = Checkpointing(
            writer, self.settings, stop, self.print_rank0, self.copies
        )
        self.ema = ema.Ema(engine, self.settings.ema_tokens)
        stream_options = self.feed.stream_options(*self.layout.evaluation_shard(self.rank))
        self.token_bytes = self._agreed_token_bytes(device)
        self.evaluations = Evaluations(
            plan, engine, device, stream_options, self.ema, self.print_rank0, self.token_bytes
        )
        self.uploads = process.Uploads(
            self.run_dir, self.settings.upload_to, self.settings.upload_keep, self.rank == 0
        )
        self.html_report = report_process.HtmlReport(
            self.run_dir, self.settings.report_interval, self.rank == 0
        )
        self.progress = Progress()
        self.stopping = False
        self.gate = StepGate(self.engine)
        self.spike_guard = stability.spike_guard(plan.settings, plan.profile)
        self.integrity = Integrity(
            engine,
            partial(self.gate.discard, engine),
            enabled=self.settings.corruption_checks,
            interval=self.settings.replay_interval,
            seed=self.settings.seed,
            replicated=plan.profile.zero_stage < 3 and self.layout.tensor == 1,
            overflows_are_normal=self.spike_guard.policy.overflows_are_normal,
        )
        self.clipping = adaptive_clip.Clipping(
            plan.profile.gradient_clipping or 0.0, self.settings.adaptive_clip
        )
        self.health = health.Health(
            engine,
            device,
            interval=plan.settings.log_interval,
            clips=self.clipping.is_active,
            norm_is_of_gradient=self.spike_guard.policy.watch_norm,
            layout=self.layout,
        )
        self.routing = Routing(
            engine.module,
            interval=plan.settings.log_interval,
            balance_rate=plan.settings.balance_rate,
            compiled=plan.settings.compile,
            global_loss=plan.settings.global_router_loss,
            z_loss=plan.settings.router_z_loss,
        )
        layers = attention_layers(plan.model.config) if plan.settings.qk_clip else ()
        self.attention_logits = AttentionLogits(engine.module, layers, device)
        self.qk_clip = QkClip(engine, plan.settings.qk_clip, [layer.outputs for layer in layers])
        self.profiler = StepProfiler(self.settings.profile, self.run_dir, device, self.journal)
        self.anomaly_response: str | None = None  # to the last step, from the spike guard

    def _agreed_token_bytes(self, device: Any) -> Any:
        """Return the bytes of each token on the device; None if a rank cannot read them."""
        table = self.plan.token_bytes
        known = collectives.gather_objects(table is not None)
        if table is None or not all(known):
            if any(known):
                self.print_rank0("note: no bits per byte: a host lacks the tokenizer of the data")
            return None
        return torch.from_numpy(table.rows()).to(device)

    def print_rank0(self, *values: object) -> None:
        """Print on rank 0."""
        collectives.print_rank0(self.rank, *values)

    @property
    def finished(self) -> bool:
        """Whether the token budget is spent."""
        return self.progress.tokens >= self.settings.total_tokens

    def due(self, interval: int) -> bool:
        """Return whether this step is a multiple of `interval`, or the last one."""
        return self.finished or self.stopping or self.progress.step % interval == 0

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is due after this step."""
        interval = self.settings.checkpoint_interval
        return self.due(interval) or self.checkpointing.retries(self.progress.step)

    def start(self) -> bool:
        """Load the newest complete checkpoint if there is one, write run.json and open the logs.

        Returns:
            Whether there was a checkpoint.
        """
        self.progress, found, damage, in_memory = load_newest(
            self.engine,
            self.plan,
            self.run_dir,
            self.progress,
            self.feed.probe_batches,
            self.print_rank0,
            self.copies,
        )
        if in_memory:
            published = published_checkpoints(RunFiles(self.run_dir).checkpoints)
            self.checkpointing.newest = str(published[-1]) if published else None
        elif found is not None:
            self.checkpointing.newest = str(found.directory)
        self.progress.ema_counted = self.ema.resume(self.progress.ema_counted)
        self.integrity.restart()
        self.spike_guard.history = History(**self.progress.history)
        self.clipping.statistics = adaptive_clip.NormStatistics(**self.progress.clipping)
        self.routing.state = self.progress.routing
        self.record = run_directory.record(self.plan)
        self.record["skipped_windows"] = self.progress.skipped_windows
        run_directory.write(self.run_dir, self.record, self.rank)
        step = self.progress.step
        self.journal.open(step)
        self.evaluations.restore(self.journal.log, step)
        resharded = self.plan.resharded(found.manifest) if found else []
        newest = str(found.directory) if found is not None else None
        self.journal.log_start(step, newest, damage, found is not None, resharded)
        return found is not None

    def batches(self) -> Any:
        """Return an endless iterator over this rank's micro-batches, from the run's position."""
        return self.feed.batches(self.progress)

    # ---- One step

    def step(self, batches: Any) -> None:
        """Read one global batch, accumulate its gradient, and take the optimizer step."""
        progress, seq_len = self.progress, self.settings.seq_len
        sequences = self.plan.batch_schedule(progress.position)
        record_progress("data", progress.step + 1, (progress.position, sequences))
        fault_point("step.begin", progress.step + 1)
        self.batch_tokens = sequences * seq_len
        with self.profiler.step(progress.step + 1), self.journal.stopwatch.timing_step():
            micro_batches, result = self._train(batches, sequences)
            if self._reads_device_after(progress.step + 1, result):
                self.journal.stopwatch.wait_for_device()
        self.journal.stopwatch.count(sequences, self.batch_tokens)
        stop_requests, *checkpoint_flags = result.flags  # sums over ranks
        self.last_step, self.stopping = result, stop_requests > 0
        progress.step += 1
        progress.position += sequences
        self.anomaly_response = self.spike_guard.end_step(
            progress.step, result.loss, result.grad_norm, result.applied
        )
        progress.history = vars(self.spike_guard.history)
        progress.health = self.health.end_step(progress.health, result)
        if result.applied:
            progress.tokens += self.batch_tokens
            self.clipping.end_step(result.grad_norm)
            progress.clipping = vars(self.clipping.statistics)
        else:
            progress.skipped_steps += 1
        if self.spike_guard.reason or not result.applied:
            progress.spikes += bool(self.spike_guard.reason)
            self.journal.log_anomaly(self.spike_guard, progress, result, sequences)
        if result.applied and self.layout.rank_in_replica(self.rank) == 0:
            instrumentation.record_sequences(progress.step, micro_batches)
        self.integrity.end_step(progress.step, fault_point("step.end", progress.step))
        if self.integrity.replayed is not None:
            self.journal.log_replay(progress.step, self.integrity.replayed)
        self.journal.console.step(progress.step)
        if self.feed.entered_new_stage(progress):
            self.journal.log_stage(progress.step, self.feed.stage)
        self.checkpointing.advance(
            checkpoint_flags, self.journal.log, last=self.finished or self.stopping
        )

    def _reads_device_after(self, step: int, result: train_step.StepResult) -> bool:
        """Return whether a step is followed by a report, save or evaluation, or is the last one."""
        settings = self.settings
        intervals = (
            settings.log_interval,
            settings.checkpoint_interval,
            settings.eval_interval,
            settings.downstream_interval,
            settings.memory_checkpoint_interval,
        )
        last = self.progress.tokens + self.batch_tokens >= settings.total_tokens
        stops = result.flags[0] > 0
        return last or stops or any(each and step % each == 0 for each in intervals)

    def _train(self, batches: Any, sequences: int) -> tuple[list[Any], train_step.StepResult]:
        """Take a step on the next micro-batches; return them, and the result of the step."""
        progress, plan, stopwatch = self.progress, self.plan, self.journal.stopwatch
        micro_steps = sequences // (plan.settings.micro_batch_size * self.layout.replicas)
        with stopwatch.timing_data(), record_function("data"):
            micro_batches = train_step.take_micro_batches(batches, micro_steps)
        fault = fault_point("step.backward", progress.step + 1)
        flags = (float(self.stop.poll()), *self.checkpointing.flags())
        shards = [ulysses.shard_batch(batch, self.layout, self.rank) for batch in micro_batches]

        def passes(watch: Watch | None) -> train_step.StepResult:
            train_step.seed_step(self.settings.seed, progress.position, self.rank)
            self.health.begin(progress.step + 1, micro_steps)
            self.routing.begin(progress.step + 1)
            self.attention_logits.begin()
            return train_step.forward_backward(
                self.engine,
                shards,
                len(plan.sources),
                self.settings.seq_len,
                self.layout,
                flags=flags,
                rows_differ=self.settings.rows_differ,
                fault=fault,
                timing_forward=stopwatch.timing_forward,
                observing_forward=self._observing_forward,
                observing_backward=self.health.observe_backward,
                token_bytes=self.token_bytes,
                routing=self.routing,
                z_loss=plan.settings.z_loss,
                watch=watch,
            )

        result = self.integrity.checked(progress.step + 1, micro_batches, passes, fault)
        tokens = progress.tokens + self.batch_tokens
        rate = plan.learning_rate(tokens) if plan.learning_rate else None
        instrumentation.record_memory(self.engine, progress.step + 1)
        result.attention_logits = self.attention_logits.largest()
        self.health.before_update()
        with self.qk_clip.clipping(result.attention_logits):
            train_step.apply_step(
                self.engine,
                self.gate,
                result,
                rate,
                self.rate_ratios,
                factor=self.spike_guard.factor,
                refused=self.spike_guard.check_loss(result.loss),
                should_refuse=self.spike_guard.check_grad_norm,
                clip_norm=self.clipping.bound,
            )
        self.routing.end_step(result.applied)
        if result.applied:
            progress.ema_counted = self.ema.update(progress.ema_counted, self.batch_tokens)
        progress.routing = self.routing.state
        return micro_batches, result

    @contextmanager
    def _observing_forward(self, batch: train_step.Batch) -> Iterator[None]:
        with self.routing.observing(), self.attention_logits.observing(batch):
            yield

    # ---- Anomalies

    def respond_to_anomaly(self) -> Rollback | None:
        """Cool down, or return the rollback to make, as the spike guard decided on the last step.

        Raises:
            GaveUp: on every rank: the run cannot recover by itself.
        """
        response = self.anomaly_response
        if response is None:
            return None
        if response == COOL_DOWN:
            self.journal.log_cooldown(self.progress.step, self.spike_guard.reason)
            return None
        self.finish_checkpoint()  # the one being written may be the rollback's target
        entry = stability.plan_rollback(
            self.spike_guard,
            response,
            self.progress,
            self.settings,
            self.run_dir,
            self.plan.batch_schedule,
            self.rank,
            self._position_after,
        )
        if entry is not None:
            entry["order"] = run_record.data_order(self.plan)
        return entry

    def _position_after(self, found: Checkpoint) -> int:
        """Return the position from which the run would continue after loading a checkpoint."""
        order = run_record.data_order(self.plan)
        return continued(found, read_rollbacks(self.run_dir), order).position

    def roll_back(self, batches: Any, entry: Rollback) -> Any:
        """Load a checkpoint from before the spike; return batches that skip the spike's data.

        Does the same as a restart, in the same process. Every rank must call.
        """
        batches.close()  # ends the loader's workers
        self.journal.log_rollback(self.progress.step, entry)
        if self.rank == 0:
            rollback.record(self.run_dir, entry)
        collectives.barrier()  # every rank reads what rank 0 has written
        fault_point("rollback.load", entry["from_step"])
        self.start()
        if self.rank == 0:
            rollback.remove_older(self.run_dir, entry["number"])
        return self.batches()

    # ---- Metrics, checkpoints, evaluation

    def report(self) -> None:
        """Log the metrics since the last report: to metrics.jsonl, trackers and console."""
        result, progress, names = self.last_step, self.progress, self.plan.source_names
        health_row, progress.health = self.health.row(progress.health, result)
        row = {
            "step": progress.step,
            "tokens": progress.tokens,
            **metrics.training_row(result, names),
            **health_row,
            **self.clipping.metrics(result.clipped_to),
            **result.router,
            **metrics.attention_row(result, self.attention_logits.layers, self.settings.qk_clip),
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
        """Copy this step's state to host memory; a checkpoint is written from it in the background.

        Raises:
            GaveUp: the weights are not finite.
            CheckpointWriteError: too many checkpoints could not be written.
        """
        norm = self.health.parameter_norm()
        stability.require_finite_weights(norm, self.progress.step, self.checkpointing.newest)
        plan = self.plan
        self.checkpointing.save(
            self.progress,
            self.journal.log,
            last=self.finished or self.stopping,
            manifest_entries=lambda: {
                **self._manifest_entries(),
                "probe": probe.measure(self.engine, self.feed.probe_batches(), plan),
            },
        )

    def copy_to_memory(self) -> None:
        """Copy this step's state to the memory of the hosts, at `--memory_checkpoint_interval`."""
        interval = self.settings.memory_checkpoint_interval
        if interval and self.progress.step % interval == 0:
            entries = {**self._manifest_entries(), "plan": self.plan.fingerprint()}
            self.checkpointing.copy_to_memory(self.progress, self.journal.log, entries)

    def _manifest_entries(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "optimizer": topology.optimizer_kind(plan.profile),
            "data_fingerprint": plan.data_fingerprint,
            "precision": plan.profile.precision,
            "cut": topology.sharding(plan.profile),
            "order": run_record.data_order(plan),
            "versions": self.record["versions"],
            "model_config": self.record["model_config"],
        }

    def _remove_copies(self) -> None:
        """Remove the copies in memory of a run that has ended: its checkpoint is on disk."""
        if self.copies is not None and self.copies.leads:
            memory.remove_copies(self.run_dir)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        self.checkpointing.finish(self.journal.log, last=self.finished or self.stopping)

    def evaluate_if_due(self) -> None:
        """Run the evaluations that are due at this step, after its checkpoint is complete."""
        self.evaluations.run_due(
            self.progress, self.journal.log, self.due, self.finish_own_checkpoint
        )

    def finish_own_checkpoint(self) -> None:
        """Wait for the checkpoint of this step, so that a crash in an evaluation loses no step."""
        if self.checkpointing.step == self.progress.step:
            self.finish_checkpoint()

    def end(self) -> int:
        """Log how the run ended, close everything, and return the exit code."""
        record_progress("end")
        step, log = self.progress.step, self.journal.log
        if self.plan.profile.block("comms_logger"):
            collectives.print_communication_table()
        if self.finished:
            log.event("done", step, tokens=self.progress.tokens)
            self.print_rank0(f"done: {step} steps, {self.progress.tokens} tokens, {self.run_dir}")
        else:
            reasons = collectives.gather_objects(self.stop.reason)
            reason = next(filter(None, reasons), "a request")
            log.event("stopped", step, reason=reason)
            self.print_rank0(f"stopped on request ({reason}): run the same command again to resume")
        self.journal.close("done" if self.finished else "stopped")
        self._remove_copies()
        process_group.destroy(self.engine)
        self._finish_child_processes()
        # After another exit code than 0 the launcher ends all other ranks, so rank 0 comes first.
        while not self.finished and process_group.waits_for_rank0():
            record_progress("end")
            time.sleep(0.05)
        return EXIT_DONE if self.finished else EXIT_STOPPED

    def fail(self, error: ZerolmError) -> None:
        """Log the error for which all ranks end the run, and close everything."""
        if isinstance(error, GaveUp):
            self.finish_checkpoint()
            self._remove_copies()
        event = "gave_up" if isinstance(error, GaveUp) else "failed"
        if isinstance(error, CorruptionError):
            event = "corrupted"
            self.journal.log.event(
                "corrupted", self.progress.step + 1, reason=str(error), places=error.places
            )
        else:
            self.journal.log.event(event, self.progress.step, reason=str(error))
        self.journal.close(event)
        self._finish_child_processes()

    def _finish_child_processes(self) -> None:
        """Wait for the HTML report, the uploads and the trackers, each for a limited time."""
        self.html_report.finish()
        self.uploads.finish(self.settings.upload_wait)
        self.journal.log.finish_trackers()
