"""What is measured beside training: validation loss, HellaSwag, lm-eval's tasks, samples.

A run calls it between two steps, on every rank, when the checkpoint of the step is safe. Whatever
is measured leaves the engine and every random generator as they were. What the first rank prepares
and concludes may fail: that is an event, and the run goes on. A forward pass that fails ends the
run where other ranks may be in it. What is begun is noted first (begun.py): the next start tries
it once more, since the last one may have been killed, and where that ends the run again, nothing
more is measured at that step, on any rank.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerolm.common.errors import ConfigError
from zerolm.common.faults import fault_point
from zerolm.common.files import write_json
from zerolm.common.run_files import RunFiles
from zerolm.data import loader as data
from zerolm.distributed.collectives import broadcast_object, gather_objects
from zerolm.evaluate import hellaswag, lm_eval, rules, sampling, validation
from zerolm.evaluate.attempts import Begun
from zerolm.evaluate.keepalive import hear
from zerolm.evaluate.likelihood import Ranks, Row, fitting_tokens
from zerolm.evaluate.text_coder import TextCoder, prompt_ids
from zerolm.plan.plan import Plan
from zerolm.watchdog.progress import record_progress, with_progress

# What is measured, beside the tasks by their names.
LOSS, HELLASWAG, TASKS, SAMPLES = "loss", "hellaswag", "tasks", "samples"

Due = Callable[[int], bool]
Measure = Callable[[Any, Any], None]


class Evaluations:
    """The evaluations of a run on one rank. Every rank makes the same calls.

    Args:
        engine: the DeepSpeed engine.
        cut: how validation data is cut into this rank's micro-batches, see `data.WindowStream`.
        say: prints on rank 0.
    """

    def __init__(self, plan: Plan, engine: Any, device: Any, cut: dict[str, Any], say: Any):
        self.plan, self.engine, self.device, self.cut, self.say = plan, engine, device, cut, say
        self.settings = plan.settings
        self.first = engine.global_rank == 0
        self.run_dir = plan.run_dir
        self.rows: list[Row] | None = None  # of HellaSwag
        self.items: list[hellaswag.Item] = []
        self.sampled_tokens = 0  # of the run, when samples were last due
        self.begun = Begun(self.run_dir)
        self.given_up: dict[int, int] = {}  # steps at which nothing is measured any more: tokens
        # ZeRO-3 would be left with weights half gathered.
        self.survives = engine.world_size == 1 and plan.profile.zero_stage < 3
        self.unusable: str | None = None  # why texts cannot be used
        settings = plan.settings
        if not (settings.hellaswag or settings.eval_tasks or settings.prompts):
            return
        try:
            coder = TextCoder(rules.tokenizer_dir(plan.sources), plan.sources[0].eos_id)
        except ConfigError as error:
            self.unusable = str(error)
        # A new run was refused for it: one that goes on does so without.
        self.unusable = next(filter(None, gather_objects(self.unusable)), None)
        if self.unusable:
            return
        self.compute = lm_eval.Compute(
            engine,
            coder,
            device,
            rules.tokens_at_once(settings, plan.model.config, coder.tokenizer),
            fitting_tokens(plan.settings.micro_batch_size * self.cut["seq_len"], plan.model.config),
            Ranks(engine.global_rank, engine.world_size),
            lambda: record_progress("evaluate"),
        )

    def begin(self, log: Any, step: int) -> None:
        """Find out what was sampled, and what has ended the run. Every rank calls, after each load.

        Args:
            step: at which the run is now.
        """
        sampled = 0
        if self.first:
            entry = self.begun.settle()
            if entry is not None:
                self._ended_in(entry, log)
            sampled = log.sampled_tokens()
        sampled, self.given_up = broadcast_object((sampled, self.begun.given_up()))
        places = [tokens for at, tokens in self.given_up.items() if at <= step]
        self.sampled_tokens = max([sampled, *places])

    def if_due(self, progress: Any, log: Any, due: Due, make_safe: Callable[[], None]) -> None:
        """Measure whatever this step is to be measured by, and has not been. Every rank calls.

        Args:
            progress: of the run.
            log: its `RunLog`.
            due: tells whether something done every so many steps is done now.
            make_safe: called before the first one: waits for the checkpoint of this step.
        """
        wanted: list[tuple[str, str, Measure]] = []
        settings = self.settings
        if self.plan.val_sources and settings.eval_interval and due(settings.eval_interval):
            wanted.append((LOSS, "eval/loss", self.validate))
        if settings.downstream_interval and due(settings.downstream_interval):
            if settings.hellaswag:
                wanted.append((HELLASWAG, "eval/hellaswag/acc", self.run_hellaswag))
            names = rules.task_names(settings)
            if names:
                wanted.append((TASKS, f"eval/{names[-1]}/", self.run_tasks))
        if wanted:
            has = broadcast_object([log.has(progress.step, key) for _, key, _ in wanted])
            wanted = [each for each, there in zip(wanted, has, strict=True) if not there]
        if self.samples_due(progress.tokens):
            wanted.append((SAMPLES, "", self.sample))
            self.sampled_tokens = progress.tokens
        if not wanted or progress.step in self.given_up:
            return
        make_safe()
        fault_point("evaluation.begin", progress.step)
        with undisturbed(self.engine):
            for what, _, measure in wanted:
                self._measure(what, measure, progress, log)

    def _measure(self, what: str, measure: Measure, progress: Any, log: Any) -> None:
        """Measure one thing, which is noted as begun before any rank computes."""
        record_progress("evaluate")
        if self.unusable and what != LOSS:
            self._failed(what, progress.step, log, self.unusable)
            return
        with nullcontext() if what == TASKS else self._noted(what, progress):
            broadcast_object(None)  # it is on disk
            with self._failing(what, progress, log) if self.survives else nullcontext():
                if what != TASKS:
                    fault_point("evaluation.measure", progress.step)
                measure(progress, log)

    @contextmanager
    def _noted(self, what: str, progress: Any) -> Iterator[None]:
        if self.first:
            self.begun.begin(progress.step, progress.tokens, what)
        yield
        if self.first:
            self.begun.end()

    def samples_due(self, tokens: int) -> bool:
        """Tell whether the run has passed a place where samples are due since it last had them."""
        if not self.settings.prompts:
            return False
        places = (self.settings.total_tokens, self.settings.sample_interval)
        return sampling.passed(tokens, *places) > sampling.passed(self.sampled_tokens, *places)

    # ---- What is measured

    def validate(self, progress: Any, log: Any) -> None:
        """Measure the validation loss."""
        plan = self.plan
        held_out = data.ValidationStream(
            plan.val_sources, num_sequences=plan.val_sequences, **self.cut
        )
        loader = data.make_loader(held_out, 0, False)
        batches = with_progress("evaluate", data.prefetch_to_device(loader, self.device))
        row = validation.validation_loss(self.engine, batches, plan.val_source_names)
        self.engine.eval()
        log.metrics({"step": progress.step, "tokens": progress.tokens, **row})
        self.say(
            f"step={progress.step} eval_loss={row['eval/loss']:.4f} "
            f"eval_perplexity={row['eval/perplexity']:.2f}"
        )

    def run_hellaswag(self, progress: Any, log: Any) -> None:
        """Measure HellaSwag's two accuracies; the file keeps the newest, item by item."""
        if self.rows is None:
            self.rows = self._prepared(HELLASWAG, progress, log, self._hellaswag_rows)
        if self.rows is None:
            return
        scores = self.compute.score(self.rows)
        with self._failing(HELLASWAG, progress, log):
            likelihoods = iter(likelihood for likelihood, _ in scores)
            outcomes = [
                hellaswag.outcome(item, [next(likelihoods) for _ in item.endings])
                for item in self.items
            ]
            found = hellaswag.accuracies(outcomes)
            where = {"step": progress.step, "tokens": progress.tokens}
            log.metrics({**where, **{f"eval/hellaswag/{key}": v for key, v in found.items()}})
            each = [hellaswag.to_json(outcome) for outcome in outcomes]
            content = {**where, **found, "outcomes": each}
            write_json(RunFiles(self.run_dir).hellaswag, content)
            self._say_figures(progress, {f"hellaswag/{key}": v for key, v in found.items()})

    def _hellaswag_rows(self) -> list[Row]:
        self.items = hellaswag.read_items(
            self.settings.hellaswag or "", self.settings.hellaswag_items
        )
        asked = [item.requests for item in self.items]
        return self.compute.coder.rows(asked, self.compute.max_length)

    def run_tasks(self, progress: Any, log: Any) -> None:
        """Run lm-eval's tasks: the first rank asks, all compute."""
        if not self.first:
            lm_eval.serve(self.compute)
            return
        where = {"step": progress.step, "tokens": progress.tokens}
        with lm_eval.quiet(), lm_eval.served(self.compute) as patience:
            for name in rules.task_names(self.settings):
                if log.has(progress.step, f"eval/{name}/"):
                    continue  # before a kill
                with self._noted(name, progress), self._failing(name, progress, log):
                    fault_point("evaluation.measure", progress.step)
                    task = lm_eval.load_tasks([name], self.settings.eval_task_path)[name]
                    items = self.settings.eval_task_items
                    found = lm_eval.evaluate(self.compute, task, items, patience)
                    log.metrics({**where, **{f"eval/{key}": v for key, v in found.items()}})
                    self._say_figures(progress, found)

    def sample(self, progress: Any, log: Any) -> None:
        """Write on from each prompt."""
        prepared = self._prepared(SAMPLES, progress, log, self._prompts)
        if prepared is None:
            return
        settings = self.settings
        choice = sampling.Choice(settings.temperature, settings.top_k, settings.top_p)
        asked = [
            sampling.Prompt(
                ids,
                settings.sample_length,
                choice,
                sampling.seed_of(settings.seed, progress.step, number),
            )
            for number, (_, ids) in enumerate(prepared)
        ]
        written = self.compute.write([(prompt, []) for prompt in asked])
        rows = [
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "prompt_number": number,
                "prompt": text,
                "text": written[number],
                "seed": asked[number].seed,
                **choice._asdict(),
            }
            for number, (text, _) in enumerate(prepared)
        ]
        with self._failing(SAMPLES, progress, log):
            log.samples(rows)
            for row in rows:
                shown = " ".join(f"{key}={json.dumps(row[key])}" for key in ("prompt", "text"))
                self.say(f"step={progress.step} sample={row['prompt_number']} {shown}")

    def _prompts(self) -> list[tuple[str, list[int]]]:
        texts = sampling.read_prompts(Path(self.settings.prompts or ""))
        prompts = [(text, prompt_ids(self.compute.coder, text)) for text in texts]
        longest = max(len(ids) for _, ids in prompts) + self.settings.sample_length
        if longest > self.compute.max_length:  # of a run that goes on: a new one was refused
            raise ConfigError(f"{longest} tokens, of at most {self.compute.max_length}")
        return prompts

    # ---- What may fail

    def _prepared(self, what: str, progress: Any, log: Any, prepare: Callable[[], Any]) -> Any:
        """Return what the first rank prepares, on every rank; None if it failed."""
        if not self.first:
            return hear(self.compute.beat)
        found = None
        with self._failing(what, progress, log), lm_eval.patience(self.compute):
            found = prepare()
        return broadcast_object(found)

    @contextmanager
    def _failing(self, what: str, progress: Any, log: Any) -> Iterator[None]:
        """Write down what fails on this rank, where no other rank waits for it, and go on."""
        try:
            yield
        except Exception as error:
            if isinstance(error, lm_eval.ForwardError) and not self.survives:
                raise
            self._failed(what, progress.step, log, f"{type(error).__name__}: {error}")

    def _failed(self, what: str, step: int, log: Any, error: str) -> None:
        reason = " ".join(error.split())[:500]
        self.say(f"step={step} {what} FAILED, training goes on: {reason}")
        log.event("evaluation_failed", step, evaluation=what, error=reason)

    def _ended_in(self, entry: dict[str, Any], log: Any) -> None:
        step, what = entry["step"], entry["what"]
        if step in self.begun.given_up():
            self._failed(what, step, log, "the run ended in it, again at this step")
            return
        self.say(f"step={step} {what}: the run ended in it; it is tried once more")
        log.event("evaluation_interrupted", step, evaluation=what)

    def _say_figures(self, progress: Any, found: dict[str, float]) -> None:
        shown = " ".join(f"{key}={value:.4g}" for key, value in found.items())
        self.say(f"step={progress.step} {shown}")


@contextmanager
def undisturbed(engine: Any) -> Iterator[None]:
    """Put an engine into evaluation mode, and all back as it was: modes, random generators."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.cuda.get_rng_state(engine.device) if engine.device.type == "cuda" else None
    engine.eval()
    try:
        yield
    finally:
        engine.train()
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device, engine.device)
