"""`Run`: the parts of a run on one rank, and the methods that pretrain.py's training loop calls.

It connects the data feed, steps, features, spike guard, checkpointing, evaluations, journal and
other parts, which do not depend on each other. Optional parts are features; `Stepper.take` shows
the order of their hooks. The modules `resume`, `recovery` and `ending` start a run, roll it back,
and end it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from zerolm.checkpoint.manifest import Progress
from zerolm.common.faults import fault_point
from zerolm.distributed import collectives
from zerolm.engine.protocol import Engine
from zerolm.engine.step_gate import StepGate
from zerolm.evaluate.evaluator import Evaluations
from zerolm.features.feature import Feature, StepInputs, StepResult
from zerolm.health.norms import parameter_norm
from zerolm.plan.plan import Plan
from zerolm.tracking.report_process import HtmlReport
from zerolm.train import instrumentation, metrics, stability
from zerolm.train.checkpointing import Checkpointing
from zerolm.train.data_feed import DataFeed
from zerolm.train.journal import Journal
from zerolm.train.profiling import StepProfiler
from zerolm.train.step import Stepper
from zerolm.upload.process import Uploads
from zerolm.watchdog.progress import record_progress


class Run:
    """A run on one rank: its engine, its progress and its logs. Every rank makes the same calls.

    Args:
        features: features from `zerolm.features.build`, which have already changed the model and
            engine.

    Attributes:
        progress: the run's progress, as saved in checkpoints.
        stopping: whether the ranks have agreed to save and stop.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        features: Sequence[Feature],
        device: Any,
        stop: stability.StopRequest,
    ):
        self.plan, self.settings, self.run_dir = plan, plan.settings, plan.run_dir
        self.engine, self.features, self.stop, self.layout = engine, features, stop, plan.layout
        self.device, self.rank = device, engine.global_rank
        self.progress, self.stopping = Progress(), False
        self.print_rank0 = partial(collectives.print_rank0, self.rank)
        self.journal = Journal(plan, self.rank, engine.world_size, device, self.print_rank0)
        self.feed = DataFeed(plan, self.rank, device, self.print_rank0)
        self.checkpointing = Checkpointing(
            plan, engine, self.feed.probe_batches, stop, self.print_rank0
        )
        self.gate = StepGate(engine)
        self.spike_guard = stability.spike_guard(plan.settings, plan.ds)
        for feature in features:
            feature.attach(self)
        stream_options = self.feed.stream_options(*self.layout.evaluation_shard(self.rank))
        self.token_bytes = self.feed.token_bytes()
        self.stepper = Stepper(
            plan, engine, self.gate, features, self.spike_guard,
            self.journal.stopwatch.timing_forward, self.token_bytes,
        )  # fmt: skip
        self.evaluations = Evaluations(
            plan, engine, device, stream_options, features, self.print_rank0, self.token_bytes
        )
        is_first, settings = self.rank == 0, plan.settings
        self.uploads = Uploads(plan.run_dir, settings.upload_to, settings.upload_keep, is_first)
        self.html_report = HtmlReport(plan.run_dir, settings.report_interval, is_first)
        self.profiler = StepProfiler(settings.profile, plan.run_dir, device, self.journal)
        self.anomaly_response: str | None = None  # spike guard's response to the last step

    @property
    def finished(self) -> bool:
        """Whether the token budget has been spent."""
        return self.progress.tokens >= self.settings.total_tokens

    @property
    def ends(self) -> bool:
        """Whether the run ends after this step."""
        return self.finished or self.stopping

    def due(self, interval: int) -> bool:
        """Return whether the last completed step is a multiple of `interval` or ends the run."""
        return self.ends or self.progress.step % interval == 0

    def batches(self) -> Any:
        """Return an endless iterator over this rank's micro-batches, from the run's position on."""
        return self.feed.batches(self.progress)

    # ---- One step

    def step(self, batches: Any) -> None:
        """Read a global batch, take an optimizer step on it, and log the outcome."""
        number, stopwatch = self.progress.step + 1, self.journal.stopwatch
        sequences = self.plan.batch_schedule(self.progress.position)
        record_progress("data", number, (self.progress.position, sequences))
        fault_point("step.begin", number)
        with self.profiler.step(number), stopwatch.timing_step():
            with stopwatch.timing_data():
                micro_batches = self.feed.take(batches, sequences)
            step = self.next_step(micro_batches, sequences)
            result = self.stepper.take(step)
            if self.waits_for_device(step, result):
                stopwatch.wait_for_device()
        stopwatch.count(sequences, step.tokens)
        self.end_step(step, result, sequences)

    def next_step(self, micro_batches: Any, sequences: int) -> StepInputs:
        """Return the next step, with this rank's micro-batches."""
        number, rate = self.progress.step + 1, self.plan.learning_rate
        tokens = sequences * self.settings.seq_len
        return StepInputs(
            number,
            micro_batches,
            self.progress.position,
            tokens,
            learning_rate=rate(self.progress.tokens + tokens) if rate else None,
            flags=(float(self.stop.poll()), *self.checkpointing.flags()),
            fault=fault_point("step.backward", number),
        )

    def waits_for_device(self, step: StepInputs, result: StepResult) -> bool:
        """Return whether a step is followed by a report, save or evaluation, or ends the run."""
        settings = self.settings
        intervals = [settings.log_interval, settings.checkpoint_interval, settings.eval_interval]
        intervals += [settings.downstream_interval, *(each.interval for each in self.features)]
        last = self.progress.tokens + step.tokens >= settings.total_tokens
        stops = result.flags[0] > 0
        return last or stops or any(each and step.number % each == 0 for each in intervals)

    def end_step(self, step: StepInputs, result: StepResult, sequences: int) -> None:
        """Count and log a step, and advance the checkpoint write in progress, if any."""
        progress, guard = self.progress, self.spike_guard
        stop_requests, *checkpoint_flags = result.flags  # sums over ranks
        self.last_result, self.stopping = result, stop_requests > 0
        progress.step = step.number
        progress.position += sequences
        self.anomaly_response = guard.end_step(
            step.number, result.loss, result.grad_norm, result.applied
        )
        progress.history = vars(guard.history)
        self._collect_states()
        if result.applied:
            progress.tokens += step.tokens
        else:
            progress.skipped_steps += 1
        if guard.reason or not result.applied:
            progress.spikes += bool(guard.reason)
            self.journal.log_anomaly(guard, progress, result, sequences, self.anomaly_response)
        if result.applied and self.layout.leads_replica(self.rank):
            instrumentation.record_sequences(step.number, step.batches)
        instrumentation.fault_after_step(self.engine, step.number)
        self.journal.console.step(step.number)
        if self.feed.entered_new_blend(progress):
            self.journal.log_blend(step.number, self.feed.blend)
        self.checkpointing.advance(checkpoint_flags, self.journal.log, last=self.ends)

    # ---- Metrics, checkpoints, evaluation

    def report(self) -> None:
        """Log the metrics since the last report to metrics.jsonl, the trackers and the console."""
        result, progress = self.last_result, self.progress
        row = metrics.training_row(result, self.plan.source_names)
        for feature in self.features:
            row |= feature.row(result)
        self._collect_states()
        where = {"step": progress.step, "tokens": progress.tokens}
        self.journal.report(progress, where | row | self.feed.row(progress))

    def _collect_states(self) -> None:
        self.progress.features = {each.name: each.state for each in self.features if each.state}

    def save_if_due(self) -> None:
        """Save a checkpoint if one is due: copy the state, and write it in the background.

        Raises:
            GaveUp: the weights are not finite.
            CheckpointWriteError: see `Checkpointing.save`.
        """
        step = self.progress.step
        if not (self.due(self.settings.checkpoint_interval) or self.checkpointing.retries(step)):
            for feature in self.features:
                feature.between_saves()
            return
        norm = parameter_norm(self.engine, self.layout)
        stability.require_finite_weights(norm, step, self.checkpointing.newest)
        self.checkpointing.save(self.progress, self.journal.log, last=self.ends)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint write in progress, if any."""
        self.checkpointing.finish(self.journal.log, last=self.ends)

    def evaluate_if_due(self) -> None:
        """Run the evaluations that are due at this step, after its checkpoint is complete."""
        self.evaluations.run_due(
            self.progress, self.journal.log, self.due, self.finish_own_checkpoint
        )

    def finish_own_checkpoint(self) -> None:
        """Wait for this step's checkpoint, if any, so a crash in an evaluation loses no steps."""
        if self.checkpointing.step == self.progress.step:
            self.finish_checkpoint()
