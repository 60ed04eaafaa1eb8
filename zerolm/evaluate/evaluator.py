"""`Evaluations`: runs each of the `EVALUATIONS` that the settings turn on whenever it is due.

Every rank runs them between two steps, after the step's checkpoint is on disk. Evaluations leave
the engine and all random generators unchanged. `Crashes` decides which errors end the run. Must not
refer to an evaluation by name.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from zerolm.common.errors import ConfigError
from zerolm.common.faults import fault_point
from zerolm.distributed.collectives import broadcast_object, gather_objects
from zerolm.engine.protocol import Engine
from zerolm.evaluate import (
    EVALUATIONS,
    max_text_tokens,
)
from zerolm.evaluate.crashes import Crashes, evaluation_mode
from zerolm.evaluate.evaluation import Evaluation, Scores
from zerolm.evaluate.held_out import HeldOut
from zerolm.evaluate.likelihood import Ranks, max_batch_tokens
from zerolm.evaluate.runner import ModelRunner
from zerolm.evaluate.text_coder import TextCoder
from zerolm.features.feature import Feature
from zerolm.plan.plan import Plan
from zerolm.watchdog.progress import record_progress

IsDue = Callable[[int], bool]


def _ranks(plan: Plan, engine: Engine) -> Ranks:
    index, size = plan.layout.evaluation_shard(engine.global_rank)
    return Ranks(index, size, engine.world_size > 1)


class Evaluations:
    """A run's evaluations on one rank. Every rank must make the same calls.

    Args:
        stream_options: shape and shard of this rank's validation batches, for `HeldOut`.
        features: the run's features, whose other weights are evaluated in addition to the model's
            own.
        print_line: prints a line, only on rank 0.
        token_bytes: number of text bytes in each token, for `HeldOut`.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        device: Any,
        stream_options: dict[str, Any],
        features: Sequence[Feature],
        print_line: Callable[..., None],
        token_bytes: torch.Tensor | None = None,
    ):
        self.engine, self.features, self.print_line = engine, features, print_line
        self.is_rank0 = engine.global_rank == 0
        held_out = HeldOut(
            plan.val_sources, plan.val_source_names, plan.val_sequences, stream_options, token_bytes
        )
        settings = plan.settings
        self.evaluations: list[Evaluation] = [
            one
            for kind in EVALUATIONS
            if kind.wanted(settings)
            for one in kind.build(settings, held_out)
        ]
        # After an error in a forward pass, other ranks might be waiting, or ZeRO-3 weights might
        # stay gathered.
        survives = engine.world_size == 1 and plan.ds.zero_stage < 3
        self.crashes = Crashes(plan.run_dir, self.is_rank0, survives, print_line)
        coder, self.tokenizer_error = self._open_tokenizer(plan)
        self.runner = ModelRunner(
            engine,
            device,
            coder,
            max_text_tokens(settings, plan.model.config, coder and coder.tokenizer),
            max_batch_tokens(settings.micro_batch_size * settings.seq_len, plan.model.config),
            _ranks(plan, engine),
            lambda: record_progress("evaluate"),
        )

    def _open_tokenizer(self, plan: Plan) -> tuple[TextCoder | None, str | None]:
        """Return the training data's tokenizer, and the reason if a rank could not open it.

        In that case, preflight refuses a new run; a resumed run continues without evaluations that
        need a tokenizer.
        """
        if not any(each.on_texts for each in self.evaluations):
            return None, None
        coder, problem = None, None
        try:
            coder = TextCoder.of_shards(plan.sources[0])
        except ConfigError as error:
            problem = str(error)
        problem = next(filter(None, gather_objects(problem)), None)
        return (None if problem else coder), problem

    def restore(self, log: Any, step: int) -> None:
        """Restore when evaluations are due next, and log a crash of the previous launch. Every rank
        must call this after each load.
        """
        self.crashes.restore(log)
        disabled = [tokens for at, tokens in self.crashes.disabled_steps.items() if at <= step]
        for each in self.evaluations:
            each.restore(log, max([0, *disabled]))

    def run_due(
        self, progress: Any, log: Any, is_due: IsDue, wait_for_checkpoint: Callable[[], None]
    ) -> None:
        """Run the evaluations that are due at this step and have not been logged yet. Every rank
        must call this.

        Args:
            is_due: takes an interval in steps; returns whether one ends at this step.
            wait_for_checkpoint: called before the first evaluation.
        """
        due = [each for each in self.evaluations if each.due(progress, is_due)]
        if due:
            logged = broadcast_object([log.has(progress.step, each.logged_key) for each in due])
            due = [each for each, done in zip(due, logged, strict=True) if not done]
        if not due or progress.step in self.crashes.disabled_steps:
            return
        wait_for_checkpoint()
        fault_point("evaluation.begin", progress.step)
        with evaluation_mode(self.engine):
            for each in due:
                self._run(each, progress, log)

    def _run(self, each: Evaluation, progress: Any, log: Any) -> None:
        """Run one evaluation, after recording the attempt on disk."""
        record_progress("evaluate")
        if self.tokenizer_error and each.on_texts:
            self.crashes.log_failure(each.name, progress.step, log, self.tokenizer_error)
            return
        scores = None
        with self.crashes.recorded(each.name, progress):
            broadcast_object(None)  # the record is on disk from here on
            logged = self.crashes.logged_errors(each.name, progress, log)
            with logged if self.crashes.survives_forward_error else nullcontext():
                fault_point("evaluation.measure", progress.step)
                scores = self._measure_all(each, progress, log)
            if scores is not None and self.is_rank0:
                with self.crashes.logged_errors(each.name, progress, log):
                    each.record(scores, progress, log, self.print_line)

    def _measure_all(self, each: Evaluation, progress: Any, log: Any) -> Scores | None:
        """Measure the model's weights and other weights, such as their average.

        For the weights `ema`, the metric `eval/web/loss` becomes `eval/web/ema_loss`.
        """
        scores = self._measure(each, progress, log)
        if not each.of_other_weights:
            return scores
        others = {name: one for part in self.features for name, one in part.weights().items()}
        for name, swapped_in in others.items():
            with swapped_in:
                found = self._measure(each, progress, log)
            if scores is None or found is None:
                continue
            for key, value in found.figures.items():
                head, slash, tail = key.rpartition("/")
                scores.figures[f"{head}{slash}{name}_{tail}"] = value
        return scores

    def _measure(self, each: Evaluation, progress: Any, log: Any) -> Scores | None:
        """Return the results; None on ranks that serve rank 0, and on rank 0 after an error."""
        if each.on_every_rank:
            return each.measure(self.runner, progress.step)
        if not self.is_rank0:
            self.runner.serve()
            return None
        with self.crashes.logged_errors(each.name, progress, log), self.runner.serving_peers():
            return each.measure(self.runner, progress.step)
        return None
