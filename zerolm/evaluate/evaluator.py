"""`Evaluations` of a run: validation loss, HellaSwag, CORE, tasks of lm-eval, and samples.

Every rank runs them between two steps, once the checkpoint of the step is on disk. They leave the
engine and all random generators unchanged. `Crashes` decides which errors end the run.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerolm.common.errors import ConfigError
from zerolm.common.faults import fault_point
from zerolm.common.files import write_json
from zerolm.data import loader as data
from zerolm.distributed.collectives import broadcast_object, gather_objects
from zerolm.engine.protocol import Engine
from zerolm.evaluate import core, hellaswag, lm_eval, needle, rules, sampling, validation
from zerolm.evaluate.crashes import Crashes, evaluation_mode
from zerolm.evaluate.keepalive import receive
from zerolm.evaluate.likelihood import Ranks, Row, max_batch_tokens
from zerolm.evaluate.text_coder import TextCoder, prompt_ids
from zerolm.features.feature import Feature
from zerolm.plan.plan import Plan
from zerolm.run_dir.files import RunFiles
from zerolm.watchdog.progress import record_progress, with_progress

# What is evaluated, besides tasks, which go by their names.
LOSS, HELLASWAG, CORE, TASKS, SAMPLES = "loss", "hellaswag", "core", "tasks", "samples"
BITS_PER_BYTE = "eval/bits_per_byte"

IsDue = Callable[[int], bool]
Evaluation = Callable[[Any, Any], None]  # (progress, log)


class Evaluations:
    """The evaluations of a run on one rank. Every rank makes the same calls.

    Args:
        stream_options: shape and shard of this rank's validation batches, for
            `data.ValidationStream`.
        features: those whose other weights are evaluated beside the model's own.
        print_line: prints on rank 0.
        token_bytes: bytes of text of each token, for `sums_by_source`; None if not known.

    Attributes:
        sampled_tokens: the run's tokens when samples were last due.
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
        self.plan, self.engine, self.device = plan, engine, device
        self.stream_options, self.print_line = stream_options, print_line
        self.features = features
        self.settings, self.token_bytes = plan.settings, token_bytes
        self.is_rank0 = engine.global_rank == 0
        self.run_dir = plan.run_dir
        self.hellaswag_rows: list[Row] | None = None  # read by rank 0 at the first evaluation
        self.hellaswag_items: list[hellaswag.Item] = []  # on rank 0
        self.core_tasks: list[core.Task] = []  # on rank 0
        self.sampled_tokens = 0
        # An error in a forward pass would leave other ranks waiting, or ZeRO-3 weights gathered.
        survives = engine.world_size == 1 and plan.profile.zero_stage < 3
        self.crashes = Crashes(plan.run_dir, self.is_rank0, survives, print_line)
        self.tokenizer_error: str | None = None
        settings = plan.settings
        if not (settings.hellaswag or settings.core or settings.eval_tasks or settings.prompts):
            return
        try:
            coder = TextCoder(rules.tokenizer_dir(plan.sources), plan.sources[0].eos_id)
        except ConfigError as error:
            self.tokenizer_error = str(error)
        # Preflight refuses a new run for this; a resumed run continues without these evaluations.
        self.tokenizer_error = next(filter(None, gather_objects(self.tokenizer_error)), None)
        if self.tokenizer_error:
            return
        self.runner = lm_eval.ModelRunner(
            engine,
            coder,
            device,
            rules.max_text_tokens(settings, plan.model.config, coder.tokenizer),
            self._batch_tokens(),
            Ranks(engine.global_rank, engine.world_size),
            lambda: record_progress("evaluate"),
        )

    def restore(self, log: Any, step: int) -> None:
        """Restore when samples were due, and log a crash. All ranks call this, after each load."""
        self.crashes.restore(log)
        sampled = broadcast_object(log.sampled_tokens() if self.is_rank0 else 0)
        disabled = [tokens for at, tokens in self.crashes.disabled_steps.items() if at <= step]
        self.sampled_tokens = max([sampled, *disabled])  # skipped samples are not made up for

    def run_due(
        self, progress: Any, log: Any, is_due: IsDue, wait_for_checkpoint: Callable[[], None]
    ) -> None:
        """Run the evaluations of this step that are due and not logged yet. All ranks call this.

        Args:
            is_due: interval in steps -> whether it ends at this step.
            wait_for_checkpoint: called before the first evaluation.
        """
        due: list[tuple[str, str, Evaluation]] = []  # (name, metric key, method)
        settings = self.settings
        if self.plan.val_sources and settings.eval_interval and is_due(settings.eval_interval):
            due.append((LOSS, "eval/loss", self.validate))
        if settings.downstream_interval and is_due(settings.downstream_interval):
            if settings.hellaswag:
                due.append((HELLASWAG, "eval/hellaswag/acc", self.run_hellaswag))
            if settings.core:
                due.append((CORE, "eval/core", self.run_core))
            names = rules.task_names(settings)
            if names:
                due.append((TASKS, f"eval/{names[-1]}/", self.run_tasks))
        if due:
            logged = broadcast_object([log.has(progress.step, key) for _, key, _ in due])
            due = [each for each, done in zip(due, logged, strict=True) if not done]
        if self.samples_due(progress.tokens):
            due.append((SAMPLES, "", self.sample))
            self.sampled_tokens = progress.tokens
        if not due or progress.step in self.crashes.disabled_steps:
            return
        wait_for_checkpoint()
        fault_point("evaluation.begin", progress.step)
        with evaluation_mode(self.engine):
            for what, _, evaluation in due:
                self._run(what, evaluation, progress, log)

    def _run(self, what: str, evaluation: Evaluation, progress: Any, log: Any) -> None:
        """Run one evaluation, recorded as an attempt before any rank computes."""
        record_progress("evaluate")
        if self.tokenizer_error and what != LOSS:
            self.crashes.log_failure(what, progress.step, log, self.tokenizer_error)
            return
        # Each task is recorded by its own name, in `run_tasks`.
        with nullcontext() if what == TASKS else self.crashes.recorded(what, progress):
            broadcast_object(None)  # now the record is on disk
            logged = self.crashes.logged_errors(what, progress, log)
            with logged if self.crashes.survives_forward_error else nullcontext():
                if what != TASKS:
                    fault_point("evaluation.measure", progress.step)
                evaluation(progress, log)

    def samples_due(self, tokens: int) -> bool:
        """Return whether a point at which samples are due was passed since the last samples."""
        if not self.settings.prompts:
            return False
        now, then = (
            sampling.num_points_passed(
                each, self.settings.total_tokens, self.settings.sample_interval
            )
            for each in (tokens, self.sampled_tokens)
        )
        return now > then

    # ---- The evaluations

    def validate(self, progress: Any, log: Any) -> None:
        """Log the validation loss of the weights, and of other weights, such as their average.

        `eval/web/loss` of the weights `ema` is `eval/web/ema_loss`.
        """
        row = self._validation_row()
        others = {name: one for each in self.features for name, one in each.weights().items()}
        for name, swapped_in in others.items():
            with swapped_in:
                found = self._validation_row()
            parts = [(*key.rpartition("/"), value) for key, value in found.items()]
            row |= {f"{head}/{name}_{tail}": value for head, _, tail, value in parts}
        log.metrics({"step": progress.step, "tokens": progress.tokens, **row})
        shown = [f"eval_loss={row['eval/loss']:.4f}"]
        shown += [f"eval_perplexity={row['eval/perplexity']:.2f}"]
        if BITS_PER_BYTE in row:
            shown.append(f"eval_bits_per_byte={row[BITS_PER_BYTE]:.4f}")
        shown += [f"eval_{name}_loss={row[f'eval/{name}_loss']:.4f}" for name in others]
        self.print_line(f"step={progress.step} {' '.join(shown)}")

    def _validation_row(self) -> dict[str, float]:
        """Return validation loss and needles of the weights that the model has now."""
        plan = self.plan
        held_out = data.ValidationStream(
            plan.val_sources, num_sequences=plan.val_sequences, **self.stream_options
        )
        loader = data.make_loader(held_out, 0, False)
        batches = with_progress("evaluate", data.prefetch_to_device(loader, self.device))
        row = validation.validation_loss(
            self.engine,
            batches,
            plan.val_source_names,
            self.token_bytes,
            by_position=self.settings.loss_by_position,
        )
        self.engine.eval()
        if self.settings.needle_items:
            row |= needle.figures(
                self.engine,
                plan.val_sources,
                num_items=self.settings.needle_items,
                seq_len=self.settings.seq_len,
                packing=self.settings.packing,
                device=self.device,
                batch_tokens=self._batch_tokens(),
                ranks=Ranks(self.engine.global_rank, self.engine.world_size),
                tick=lambda: record_progress("evaluate"),
            )
        return row

    def _batch_tokens(self) -> int:
        """Return the tokens of a forward pass on texts."""
        size = self.settings.micro_batch_size * self.settings.seq_len
        return max_batch_tokens(size, self.plan.model.config)

    def run_hellaswag(self, progress: Any, log: Any) -> None:
        """Log both accuracies of HellaSwag, and write the outcomes to `hellaswag.json`."""
        if self.hellaswag_rows is None:
            self.hellaswag_rows = self._prepare(HELLASWAG, progress, log, self._read_hellaswag)
        if self.hellaswag_rows is None:
            return
        scores = self.runner.score(self.hellaswag_rows)
        with self.crashes.logged_errors(HELLASWAG, progress, log):
            likelihoods = iter(likelihood for likelihood, _ in scores)
            outcomes = [
                hellaswag.outcome(item, [next(likelihoods) for _ in item.endings])
                for item in self.hellaswag_items
            ]
            accuracies = hellaswag.accuracies(outcomes)
            where = {"step": progress.step, "tokens": progress.tokens}
            log.metrics({**where, **{f"eval/hellaswag/{key}": v for key, v in accuracies.items()}})
            each = [hellaswag.to_json(outcome) for outcome in outcomes]
            content = {**where, **accuracies, "outcomes": each}
            write_json(RunFiles(self.run_dir).hellaswag, content)
            self._print_metrics(progress, {f"hellaswag/{k}": v for k, v in accuracies.items()})

    def _read_hellaswag(self) -> list[Row]:
        self.hellaswag_items = hellaswag.read_items(
            self.settings.hellaswag or "", self.settings.hellaswag_items
        )
        requests = [item.requests for item in self.hellaswag_items]
        return self.runner.coder.rows(requests, self.runner.max_length)

    def run_core(self, progress: Any, log: Any) -> None:
        """Log CORE and the centered accuracy of its tasks; write the outcomes to `core.json`."""
        chunks = self._prepare(CORE, progress, log, self._read_core)
        outcomes: list[list[bool]] = [[] for _ in self.core_tasks]
        for number, items in chunks or ():
            prepared = self._prepare(CORE, progress, log, partial(self._core_rows, number, items))
            if prepared is None:
                return
            scores = iter(self.runner.score([row for rows in prepared for row in rows]))
            for item, rows in zip(items, prepared, strict=True):
                of_item = [next(scores) for _ in rows]
                if self.is_rank0:
                    task = self.core_tasks[number]
                    outcomes[number].append(core.is_correct(task, item, rows, of_item))
        if chunks is None or not self.is_rank0:
            return
        with self.crashes.logged_errors(CORE, progress, log):
            where = {"step": progress.step, "tokens": progress.tokens}
            figures = core.figures(self.core_tasks, outcomes)
            log.metrics({**where, **{f"eval/{key}": value for key, value in figures.items()}})
            content = {
                **where,
                "core": figures["core"],
                "tasks": core.to_json(self.core_tasks, outcomes),
            }
            write_json(RunFiles(self.run_dir).core, content)
            self._print_metrics(progress, figures)

    def _read_core(self) -> list[tuple[int, range]]:
        if not self.core_tasks:
            settings = self.settings
            self.core_tasks = core.read_bundle(settings.core or "", settings.core_items)
        return list(core.chunks(self.core_tasks))

    def _core_rows(self, number: int, items: range) -> list[list[Row]]:
        task, runner = self.core_tasks[number], self.runner
        return [core.item_rows(task, item, runner.coder, runner.max_length) for item in items]

    def run_tasks(self, progress: Any, log: Any) -> None:
        """Run the tasks of lm-eval: rank 0 runs lm-eval, all ranks compute."""
        if not self.is_rank0:
            lm_eval.serve(self.runner)
            return
        where = {"step": progress.step, "tokens": progress.tokens}
        with lm_eval.quiet(), lm_eval.serving_peers(self.runner) as keep_alive:
            for name in rules.task_names(self.settings):
                if log.has(progress.step, f"eval/{name}/"):
                    continue  # done before the run was killed
                with (
                    self.crashes.recorded(name, progress),
                    self.crashes.logged_errors(name, progress, log),
                ):
                    fault_point("evaluation.measure", progress.step)
                    task = lm_eval.load_tasks([name], self.settings.eval_task_path)[name]
                    items = self.settings.eval_task_items
                    results = lm_eval.evaluate(self.runner, task, items, keep_alive)
                    log.metrics({**where, **{f"eval/{key}": v for key, v in results.items()}})
                    own = {k: v for k, v in results.items() if k.startswith(f"{name}/")}
                    self._print_metrics(progress, own or results)  # of a group only its means

    def sample(self, progress: Any, log: Any) -> None:
        """Continue each prompt; log and print the texts."""
        prompts = self._prepare(SAMPLES, progress, log, self._encode_prompts)
        if prompts is None:
            return
        settings = self.settings
        options = sampling.SamplingOptions(settings.temperature, settings.top_k, settings.top_p)
        requests = [
            sampling.Prompt(
                ids,
                settings.sample_length,
                options,
                sampling.sample_seed(settings.seed, progress.step, number),
            )
            for number, (_, ids) in enumerate(prompts)
        ]
        texts = self.runner.generate([(request, []) for request in requests])
        rows = [
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "prompt_number": number,
                "prompt": text,
                "text": texts[number],
                "seed": requests[number].seed,
                **options._asdict(),
            }
            for number, (text, _) in enumerate(prompts)
        ]
        with self.crashes.logged_errors(SAMPLES, progress, log):
            log.samples(rows)
            for row in rows:
                shown = " ".join(f"{key}={json.dumps(row[key])}" for key in ("prompt", "text"))
                self.print_line(f"step={progress.step} sample={row['prompt_number']} {shown}")

    def _encode_prompts(self) -> list[tuple[str, list[int]]]:
        texts = sampling.read_prompts(Path(self.settings.prompts or ""))
        prompts = [(text, prompt_ids(self.runner.coder, text)) for text in texts]
        longest = max(len(ids) for _, ids in prompts) + self.settings.sample_length
        if longest > self.runner.max_length:  # preflight refuses this only for a new run
            raise ConfigError(
                f"{self.settings.prompts}: the longest prompt and --sample_length make {longest} "
                f"tokens, the maximum is {self.runner.max_length}"
            )
        return prompts

    # ---- Errors

    def _prepare(self, what: str, progress: Any, log: Any, prepare: Callable[[], Any]) -> Any:
        """Return rank 0's result of `prepare` on every rank; None if it failed."""
        if not self.is_rank0:
            return receive(self.runner.tick)
        prepared = None
        with self.crashes.logged_errors(what, progress, log), lm_eval.keep_alive(self.runner):
            prepared = prepare()
        return broadcast_object(prepared)

    def _print_metrics(self, progress: Any, metrics: dict[str, float]) -> None:
        shown = " ".join(f"{key}={value:.4g}" for key, value in metrics.items())
        self.print_line(f"step={progress.step} {shown}")
