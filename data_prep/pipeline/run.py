"""Runs a recipe: the stages of each source, one after another.

Complete stages are kept, and unfinished stages resume. The first stage with changed options or
input, and all stages after it, run again. Each stage prints which case applies.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.dedup.decontaminate import run_decontaminate
from data_prep.dedup.dedup import run_dedup
from data_prep.dedup.options import DedupOptions
from data_prep.dedup.signatures import signatures_manifest
from data_prep.encode.options import TokenizeOptions
from data_prep.encode.pack import pack
from data_prep.encode.run import run_tokenization
from data_prep.filters.clean import run_clean
from data_prep.pipeline.plan import (
    dedup_fingerprints,
    stage_fingerprints,
    tokenizer_fingerprint,
)
from data_prep.pipeline.recipe_options import TOKENIZER
from data_prep.pipeline.report import write_report
from data_prep.pipeline.state import lock_output, make_directory, read_state, write_state
from data_prep.read.bad_input import describe_changes
from data_prep.read.discovery import find_inputs
from data_prep.read.stage_files import provenance_of, read_stage
from data_prep.stages.documents import StageInput, stage_documents
from data_prep.tokenizer.load import load_tokenizer
from data_prep.tokenizer.train import train_on_stages
from zerolm.common.errors import ConfigError
from zerolm.common.provenance import versions
from zerolm.data.packing import index_file
from zerolm.shards.boundaries import notices
from zerolm.shards.reader import open_source

Json = dict[str, Any]


def prepare(recipe: Any, executor: Any) -> tuple[list["Pipeline"], "Training | None"]:
    """Return one pipeline per source, and the tokenizer training, or None without one."""
    dedup = dedup_fingerprints(recipe)
    pipelines = [Pipeline(recipe, source, executor, dedup) for source in recipe.sources]
    return pipelines, None if recipe.training is None else Training(recipe, pipelines)


def run_recipe(recipe: Any, pipelines: Sequence["Pipeline"], training: "Training | None") -> Path:
    """Run every stage that is not complete, and return the path of the report."""
    make_directory(recipe.output)
    with lock_output(recipe.output):
        by_name = {pipeline.source.name: pipeline for pipeline in pipelines}
        for source in recipe.by_preference():
            by_name[source.name].run(by_name[source.name].text_stages)
        if training is not None:
            training.run()
        for pipeline in pipelines:
            pipeline.run(recipe.stages[len(pipeline.text_stages) :])
        return write_report(recipe.output, recipe.provenance())


class Pipeline:
    """The stages of one source."""

    def __init__(self, recipe: Any, source: Any, executor: Any, dedup: Mapping[str, str]):
        self.recipe, self.source, self.executor = recipe, source, executor
        self.dedup_keys = dedup
        self.directory = (recipe.output / source.name).absolute()
        self.tokenizer_key = "" if recipe.tokenizer is None else recipe.tokenizer.fingerprint

    @property
    def text_stages(self) -> tuple[str, ...]:
        """The stages before the shards."""
        return tuple(stage for stage in self.recipe.stages if stage not in ("shards", "pack"))

    def keys(self) -> dict[str, str]:
        """Return, for each stage, a fingerprint of everything that determines its result."""
        return stage_fingerprints(self.recipe, self.source, self.tokenizer_key, self.dedup_keys)

    def states(self) -> dict[str, str]:
        """Return the state of each stage: "complete", "started", "changed" or "to do"."""
        started, states, changed = self._started(), {}, False
        for stage, key in self.keys().items():
            if stage in started and (changed or started[stage] != key):
                changed = True
                states[stage] = "changed"
            elif stage in started:
                complete = all(path.is_file() for path in self._manifests(stage))
                states[stage] = "complete" if complete else "started"
            else:
                states[stage] = "to do"
        return states

    def removed_stages(self) -> list[str]:
        """Return the stages that were started earlier but are no longer in the recipe."""
        return [stage for stage in self._started() if stage not in self.recipe.stages]

    def run(self, stages: Sequence[str]) -> None:
        """Run those of the given stages that are not complete."""
        states, keys, started = self.states(), self.keys(), self._started()
        for stage in self.removed_stages() if "clean" in stages else ():
            print(f"{self.source.name}/{stage}: is no longer in the recipe; its files are kept")
        before: Path | None = None
        for stage, state in states.items():
            if stage not in stages:
                before = self.directory / stage
                continue
            name = f"{self.source.name}/{stage}"
            output = self.directory / stage
            if state == "changed":
                print(f"{name}: runs again, because its options or input have changed")
                self._remove(stage)
            elif state == "to do" and output.exists() and any(output.iterdir()):
                raise _foreign_files(output)
            elif state != "to do":
                print(f"{name}: {'is complete' if state == 'complete' else 'resumes'}")
            if state != "complete":
                started[stage] = keys[stage]
                write_state(self.directory, started)
                start = time.monotonic()
                getattr(self, f"_run_{stage}")(output, before)
                print(f"{name}: {self._outcome(stage)}, {time.monotonic() - start:,.1f} s")
            before = output

    def _run_clean(self, output: Path, before: Path | None) -> None:
        options = self.recipe.clean
        dropped = None if options.keep_dropped is None else output / "dropped"
        options = replace(options, rules=self.source.options.rules(), keep_dropped=dropped)
        run_clean(options, self.source.inputs, output, self.executor, self._provenance())

    def _run_dedup(self, output: Path, before: Path | None) -> None:
        run_dedup(self._dedup_options(), _documents(before), output, self.executor)

    def _dedup_options(self) -> DedupOptions:
        earlier = self.recipe.sources_before(self.source)
        outputs = [str((self.recipe.output / each.name / "dedup").absolute()) for each in earlier]
        return self.recipe.dedup.of_stage(outputs)

    def _run_decontaminate(self, output: Path, before: Path | None) -> None:
        run_decontaminate(self.recipe.decontaminate, _documents(before), output, self.executor)

    def _run_shards(self, output: Path, before: Path | None) -> None:
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
                rules=self.source.options.rules(keep_records=False),
                encoder=shards.encoder,
                val_fraction=self.recipe.val_fraction(self.source) or None,
                bos=shards.bos,
                shard_tokens=shards.shard_tokens,
                max_unknown=shards.max_unknown,
            ),
            self.executor,
            {"pipeline": provenance_of(stage)},
        )

    def _run_pack(self, output: Path, before: Path | None) -> None:
        for directory in self._shard_directories():
            pack(open_source(directory), self.recipe.pack.seq_len)

    def _shard_directories(self) -> list[Path]:
        shards = self.directory / "shards"
        return [shards] + ([_validation(shards)] if self.recipe.val_fraction(self.source) else [])

    def _manifests(self, stage: str) -> list[Path]:
        """Return the files that a stage writes last; the stage is complete if all of these files
        exist.
        """
        if stage == "shards":
            return [directory / "manifest.json" for directory in self._shard_directories()]
        if stage == "pack":
            length = self.recipe.pack.seq_len
            return [index_file(directory, length) for directory in self._shard_directories()]
        manifests = [self.directory / stage / "stage.json"]
        if stage == "dedup" and self._dedup_options().keep_signatures:
            manifests.append(signatures_manifest(self.directory / stage))
        return manifests

    def _provenance(self) -> Json:
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
            made = f"{manifest['num_documents']:,} documents, {manifest['num_tokens']:,} tokens"
            return "; ".join([made, *notices(open_source(self._shard_directories()[0]))])
        kept = f"kept {manifest['documents_out']:,} of {manifest['documents_in']:,} documents"
        reading = manifest.get("reading", {})
        bad = sum(reading.get("bad", {}).values())
        kept += f", skipped {bad:,} that could not be read" if bad else ""
        return ", ".join([kept, *describe_changes(reading.get("changed", {}))])

    def _started(self) -> dict[str, str]:
        """Return the fingerprint with which each stage was started."""
        return read_state(self.directory)

    def _remove(self, stage: str) -> None:
        for directory in (self.directory / stage, _validation(self.directory / stage)):
            for manifest in ("stage.json", "manifest.json"):
                # Remove the manifest first, so that a partially removed directory is not taken for
                # data.
                (directory / manifest).unlink(missing_ok=True)
            shutil.rmtree(directory, ignore_errors=True)


class Training:
    """The tokenizer that a recipe trains on the output of every source's last text stage."""

    def __init__(self, recipe: Any, pipelines: Sequence[Pipeline]):
        self.recipe, self.pipelines = recipe, pipelines
        self.output = recipe.output / TOKENIZER
        texts = [pipeline.keys()[pipeline.text_stages[-1]] for pipeline in pipelines]
        self.key = tokenizer_fingerprint(recipe.training, texts)
        for pipeline in pipelines:
            pipeline.tokenizer_key = self.key

    @property
    def state(self) -> str:
        """The state of the tokenizer: complete, changed or to do."""
        started = read_state(self.recipe.output).get(TOKENIZER)
        if started is None:
            return "to do"
        return "complete" if started == self.key else "changed"

    def run(self) -> None:
        """Train the tokenizer unless it is complete."""
        if (state := self.state) == "complete":
            print(f"{TOKENIZER}: is complete")
            return
        if state == "changed":
            print(f"{TOKENIZER}: is trained again, because its options or text have changed")
        elif self.output.exists() and any(self.output.iterdir()):
            raise _foreign_files(self.output)
        write_state(self.recipe.output, {})
        shutil.rmtree(self.output, ignore_errors=True)
        stages = [pipeline.directory / pipeline.text_stages[-1] for pipeline in self.pipelines]
        names = [pipeline.source.name for pipeline in self.pipelines]
        options = self.recipe.training
        recipe = options.bpe()
        temporary = self.output.with_name(f".{TOKENIZER}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        trained = train_on_stages(stages, names, recipe, options.sample_bytes, temporary)
        temporary.rename(self.output)
        write_state(self.recipe.output, {TOKENIZER: self.key})
        size = f"{trained.num_bytes / 1e6:,.1f} MB of text"
        source = f"{trained.num_documents:,} documents, {size}"
        print(f"{TOKENIZER}: {trained.vocab_size:,} ids from {source}, {trained.seconds:,.1f} s")
        if trained.vocab_size < options.vocab_size:
            print(
                f"{TOKENIZER}: vocab_size {options.vocab_size:,} was not reached, since the text "
                "has no more pairs to merge."
            )


def _documents(before: Path | None) -> StageInput:
    assert before is not None
    return stage_documents(read_stage(before))


def _foreign_files(output: Path) -> ConfigError:
    return ConfigError(
        f"{output}: contains files that this pipeline did not write. Remove them, or choose "
        f"another output."
    )


def _validation(shards: Path) -> Path:
    return shards.with_name(f"{shards.name}-validation")
