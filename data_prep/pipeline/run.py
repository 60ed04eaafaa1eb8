"""`python -m data_prep run`: the stages of a recipe, one after the other, for every source.

A stage that is complete is left as it is; one that is begun goes on; and from the first one whose
options or input have changed, stages are made again. Each says which of these it is.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.command_line import Problems
from data_prep.pipeline_state import locked, make_directory, read_state, write_state
from zerolm.errors import ConfigError

LEFT_OUT = "is not in the recipe now, and stays as it is"
TOKENIZER = "tokenizer"  # directory of the one that is trained

Json = dict[str, Any]


def run(options: argparse.Namespace) -> None:
    """Run a recipe, or show its plan with --check."""
    from data_prep.executors import make_executor
    from data_prep.pipeline_plan import show_plan
    from data_prep.recipe import read_recipe

    problems = Problems()
    workers = problems.number(
        "workers", options.workers, 1, 1 << 20, default=len(os.sched_getaffinity(0))
    )
    recipe = problems.of(read_recipe, options.recipe)
    given = {} if recipe is None else recipe.executor
    executor = problems.of(make_executor, options.executor, workers, given, f"{options.recipe}")
    problems.refuse()
    for source in recipe.sources:
        for note in source.notes:
            print(note, file=sys.stderr)
    pipelines = [Pipeline(recipe, source, executor) for source in recipe.sources]
    training = None if recipe.training is None else Training(recipe, pipelines)
    if options.check:
        show_plan(recipe, options.executor, workers, pipelines, training)
        return
    make_directory(recipe.output)
    with locked(recipe.output):
        for pipeline in pipelines:
            pipeline.run(pipeline.text_stages)
        if training is not None:
            training.run()
        for pipeline in pipelines:
            pipeline.run(recipe.stages[len(pipeline.text_stages) :])
        from data_prep.pipeline_report import write_report

        print(f"report: {write_report(recipe.output, recipe.provenance())}")


class Pipeline:
    """The stages of one source."""

    def __init__(self, recipe: Any, source: Any, executor: Any):
        self.recipe, self.source, self.executor = recipe, source, executor
        self.directory = (recipe.output / source.name).absolute()
        self.tokenizer_key = "" if recipe.tokenizer is None else recipe.tokenizer.fingerprint

    @property
    def text_stages(self) -> tuple[str, ...]:
        """The stages before the shards."""
        return tuple(stage for stage in self.recipe.stages if stage not in ("shards", "pack"))

    def keys(self) -> dict[str, str]:
        """Return the stages in order, each with a fingerprint of all that decides its result."""
        from data_prep.pipeline_plan import stage_keys

        return stage_keys(self.recipe, self.source, self.tokenizer_key)

    def states(self) -> dict[str, str]:
        """Say of each stage whether it is complete, begun, changed or to do."""
        begun, found, changed = self._begun(), {}, False
        for stage, key in self.keys().items():
            if stage in begun and (changed or begun[stage] != key):
                changed = True
                found[stage] = "changed"
            elif stage in begun:
                whole = all(path.is_file() for path in self._manifests(stage))
                found[stage] = "complete" if whole else "begun"
            else:
                found[stage] = "to do"
        return found

    def left_out(self) -> list[str]:
        """Return the stages that were begun once and are not in the recipe now."""
        return [stage for stage in self._begun() if stage not in self.recipe.stages]

    def run(self, stages: Sequence[str]) -> None:
        """Run those of some stages that are not complete.

        Raises:
            ConfigError: bad input under the policy "fail".
            ZerolmError: a task was lost.
        """
        states, keys, begun = self.states(), self.keys(), self._begun()
        for stage in self.left_out() if "clean" in stages else ():
            print(f"{self.source.name}/{stage}: {LEFT_OUT}")
        before: Path | None = None
        for stage, state in states.items():
            if stage not in stages:
                before = self.directory / stage
                continue
            name = f"{self.source.name}/{stage}"
            output = self.directory / stage
            if state == "changed":
                print(f"{name}: is made again, since its options or its input have changed")
                self._remove(stage)
            elif state == "to do" and output.exists() and any(output.iterdir()):
                raise ConfigError(
                    f"{output}: holds files that this pipeline did not write. Remove them, or "
                    f"choose another output."
                )
            elif state != "to do":
                print(f"{name}: {'is complete' if state == 'complete' else 'goes on'}")
            if state != "complete":
                begun[stage] = keys[stage]
                write_state(self.directory, begun)
                start = time.monotonic()
                getattr(self, f"_run_{stage}")(output, before)
                print(f"{name}: {self._outcome(stage)}, {time.monotonic() - start:,.1f} s")
            before = output

    def _run_clean(self, output: Path, before: Path | None) -> None:
        from data_prep.clean import run_clean

        recipe, source = self.recipe, self.source
        options = replace(recipe.clean, rules=source.options.rules())
        if options.keep_dropped is not None:
            options = replace(options, keep_dropped=output / "dropped")
        run_clean(options, source.inputs, output, self.executor, self._provenance())

    def _run_dedup(self, output: Path, before: Path | None) -> None:
        from data_prep.dedup import run_dedup

        run_dedup(self.recipe.dedup, *_documents(before), output, self.executor)

    def _run_decontaminate(self, output: Path, before: Path | None) -> None:
        from data_prep.decontaminate import run_decontaminate

        run_decontaminate(self.recipe.decontaminate, *_documents(before), output, self.executor)

    def _run_shards(self, output: Path, before: Path | None) -> None:
        from data_prep.sources import find_inputs
        from data_prep.stage_files import provenance_of, read_stage
        from data_prep.tokenization import TokenizeOptions, run_tokenization
        from data_prep.tokenizers import load_tokenizer

        assert before is not None
        shards = self.recipe.shards
        outputs = self._shard_directories()
        stage = read_stage(before)
        inputs, _ = find_inputs([str(before)], stage.text_field)
        run_tokenization(
            inputs,
            self.recipe.tokenizer or load_tokenizer(str(self.recipe.output / TOKENIZER)),
            outputs,
            TokenizeOptions(
                rules=replace(self.source.options.rules(), keep_records=False),
                encoder=shards.encoder,
                val_fraction=shards.val_fraction or None,
                shard_tokens=shards.shard_tokens,
            ),
            self.executor,
            {"pipeline": provenance_of(stage)},
        )

    def _run_pack(self, output: Path, before: Path | None) -> None:
        from data_prep.pack import pack
        from zerolm.shards import open_source

        for directory in self._shard_directories():
            pack(open_source(directory), self.recipe.pack.seq_len)

    def _shard_directories(self) -> list[Path]:
        shards = self.directory / "shards"
        return [shards] + ([_validation(shards)] if self.recipe.shards.val_fraction else [])

    def _manifests(self, stage: str) -> list[Path]:
        """Return the files that are there when a stage is complete."""
        if stage == "shards":
            return [directory / "manifest.json" for directory in self._shard_directories()]
        if stage == "pack":
            from zerolm.packing import index_file

            length = self.recipe.pack.seq_len
            return [index_file(directory, length) for directory in self._shard_directories()]
        return [self.directory / stage / "stage.json"]

    def _provenance(self) -> Json:
        from zerolm.provenance import versions

        return {
            "recipe": self.recipe.provenance(),
            "source": self.source.name,
            "inputs": [
                {"file": each.name, "size_bytes": each.size_bytes, "modified_ns": each.modified_ns}
                for each in self.source.inputs
            ],
            "versions": versions(),
        }

    def _outcome(self, stage: str) -> str:
        manifest = json.loads(self._manifests(stage)[0].read_text(encoding="utf-8"))
        if stage == "pack":
            return f"{manifest['num_rows']:,} rows of {manifest['seq_len']:,} tokens"
        if stage == "shards":
            return f"{manifest['num_documents']:,} documents, {manifest['num_tokens']:,} tokens"
        words = f"kept {manifest['documents_out']:,} of {manifest['documents_in']:,} documents"
        bad = sum(manifest.get("reading", {}).get("bad", {}).values())
        return words + (f", left out {bad:,} that could not be read" if bad else "")

    def _begun(self) -> dict[str, str]:
        return read_state(self.directory)

    def _remove(self, stage: str) -> None:
        for directory in (self.directory / stage, _validation(self.directory / stage)):
            for manifest in ("stage.json", "manifest.json"):
                (directory / manifest).unlink(missing_ok=True)  # first: half of it is no data
            shutil.rmtree(directory, ignore_errors=True)


class Training:
    """The tokenizer of a pipeline, trained on the last stage of text of every source."""

    def __init__(self, recipe: Any, pipelines: Sequence[Pipeline]):
        from data_prep.pipeline_plan import tokenizer_key

        self.recipe, self.pipelines = recipe, pipelines
        self.output = recipe.output / TOKENIZER
        texts = [pipeline.keys()[pipeline.text_stages[-1]] for pipeline in pipelines]
        self.key = tokenizer_key(recipe.training, texts)
        for pipeline in pipelines:
            pipeline.tokenizer_key = self.key

    @property
    def state(self) -> str:
        """Whether it is complete, changed or to do."""
        begun = read_state(self.recipe.output).get(TOKENIZER)
        if begun is None:
            return "to do"
        return "complete" if begun == self.key else "changed"

    def run(self) -> None:
        """Train it, unless it is there."""
        from data_prep.recipe import training_recipe
        from data_prep.tokenizer_run import train_on_stages

        if (state := self.state) == "complete":
            print(f"{TOKENIZER}: is complete")
            return
        if state == "changed":
            print(f"{TOKENIZER}: is made again, since its options or its text have changed")
        elif self.output.exists() and any(self.output.iterdir()):
            raise ConfigError(
                f"{self.output}: holds files that this pipeline did not write. Remove them, or "
                f"choose another output."
            )
        write_state(self.recipe.output, {})
        shutil.rmtree(self.output, ignore_errors=True)
        stages = [pipeline.directory / pipeline.text_stages[-1] for pipeline in self.pipelines]
        names = [pipeline.source.name for pipeline in self.pipelines]
        options = self.recipe.training
        recipe = training_recipe(options)
        temporary = self.output.with_name(f".{TOKENIZER}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        trained = train_on_stages(stages, names, recipe, options.sample_bytes, temporary)
        temporary.rename(self.output)
        write_state(self.recipe.output, {TOKENIZER: self.key})
        size = f"{trained.num_bytes / 1e6:,.1f} MB of text"
        words = f"{trained.vocab_size:,} ids from {trained.num_documents:,} documents, {size}"
        print(f"{TOKENIZER}: {words}, {trained.seconds:,.1f} s")
        if trained.vocab_size < options.vocab_size:
            print(
                f"{TOKENIZER}: vocab_size {options.vocab_size:,} was not reached: the text has no "
                f"more pairs to merge."
            )


def _documents(before: Path | None) -> tuple[Any, str, Json]:
    from data_prep.stage_documents import stage_documents
    from data_prep.stage_files import read_stage

    assert before is not None
    return stage_documents(read_stage(before))


def _validation(shards: Path) -> Path:
    return shards.with_name(f"{shards.name}-validation")
