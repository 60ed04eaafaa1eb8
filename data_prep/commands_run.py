"""`python -m data_prep run`: the stages of a recipe, one after the other, for every source.

A stage that is complete is left as it is; one that is begun goes on; and from the first one whose
options or input have changed, stages are made again. Each says which of these it is.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data_prep.command_line import Problems
from zerolm.errors import ConfigError, ZerolmError

STATE = "pipeline.json"  # of a source: what each of its stages was begun with
LOCK = ".lock"
LEFT_OUT = "is not in the recipe now, and stays as it is"
MANIFESTS = {"shards": "manifest.json"}  # of stages that do not end in stage.json

Json = dict[str, Any]


def run(options: argparse.Namespace) -> None:
    """Run a recipe, or show its plan with --check."""
    from data_prep.executors import make_executor
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
    if options.check:
        _show_plan(recipe, options.executor, workers)
        return
    _make_directory(recipe.output)
    with _locked(recipe.output):
        for source in recipe.sources:
            Pipeline(recipe, source, executor).run()
        from data_prep.pipeline_report import write_report

        print(f"report: {write_report(recipe.output, recipe.provenance())}")


class Pipeline:
    """The stages of one source."""

    def __init__(self, recipe: Any, source: Any, executor: Any):
        self.recipe, self.source, self.executor = recipe, source, executor
        self.directory = (recipe.output / source.name).absolute()

    def keys(self) -> dict[str, str]:
        """Return the stages in order, each with a fingerprint of all that decides its result."""
        from data_prep.decontaminate import identity as decontaminate_identity
        from data_prep.dedup import identity as dedup_identity
        from data_prep.filters import identity
        from data_prep.phases import fingerprint
        from data_prep.units import fingerprint as inputs_fingerprint

        recipe, content = self.recipe, self.recipe.content
        key = inputs_fingerprint(self.source.inputs, self.source.options.rules())
        keys = {}
        for stage in recipe.stages:
            own: Any = content.get("tokenize" if stage == "shards" else stage, {})
            if stage == "shards":
                own = [asdict(recipe.shards), recipe.tokenizer.fingerprint]
            elif stage == "clean":
                own = [own, identity(recipe.clean.filters)]
            elif stage == "dedup":
                own = dedup_identity(recipe.dedup)
            elif stage == "decontaminate":
                own = decontaminate_identity(recipe.decontaminate)
            keys[stage] = key = fingerprint([key, stage, own])
        return keys

    def states(self) -> dict[str, str]:
        """Say of each stage whether it is complete, begun, changed or to do."""
        begun, found, changed = self._begun(), {}, False
        for stage, key in self.keys().items():
            if stage in begun and (changed or begun[stage] != key):
                changed = True
                found[stage] = "changed"
            elif stage in begun:
                whole = (self.directory / stage / MANIFESTS.get(stage, "stage.json")).is_file()
                found[stage] = "complete" if whole else "begun"
            else:
                found[stage] = "to do"
        return found

    def left_out(self) -> list[str]:
        """Return the stages that were begun once and are not in the recipe now."""
        return [stage for stage in self._begun() if stage not in self.recipe.stages]

    def run(self) -> None:
        """Run what is not complete.

        Raises:
            ConfigError: bad input under the policy "fail".
            ZerolmError: a task was lost.
        """
        states, keys, begun = self.states(), self.keys(), self._begun()
        for stage in self.left_out():
            print(f"{self.source.name}/{stage}: {LEFT_OUT}")
        before: Path | None = None
        for stage, state in states.items():
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
                _write_state(self.directory, begun)
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

        assert before is not None
        shards = self.recipe.shards
        outputs = [output] + ([_validation(output)] if shards.val_fraction else [])
        stage = read_stage(before)
        inputs, _ = find_inputs([str(before)], stage.text_field)
        run_tokenization(
            inputs,
            self.recipe.tokenizer,
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
        path = self.directory / stage / MANIFESTS.get(stage, "stage.json")
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if stage == "shards":
            return f"{manifest['num_documents']:,} documents, {manifest['num_tokens']:,} tokens"
        words = f"kept {manifest['documents_out']:,} of {manifest['documents_in']:,} documents"
        bad = sum(manifest.get("reading", {}).get("bad", {}).values())
        return words + (f", left out {bad:,} that could not be read" if bad else "")

    def _begun(self) -> dict[str, str]:
        try:
            return json.loads((self.directory / STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}

    def _remove(self, stage: str) -> None:
        for directory in (self.directory / stage, _validation(self.directory / stage)):
            for manifest in ("stage.json", "manifest.json"):
                (directory / manifest).unlink(missing_ok=True)  # first: half of it is no data
            shutil.rmtree(directory, ignore_errors=True)


def _documents(before: Path | None) -> tuple[Any, str, Json]:
    from data_prep.stage_documents import stage_documents
    from data_prep.stage_files import read_stage

    assert before is not None
    return stage_documents(read_stage(before))


def _validation(shards: Path) -> Path:
    return shards.with_name(f"{shards.name}-validation")


def _write_state(directory: Path, begun: dict[str, str]) -> None:
    from zerolm.files import write_json

    _make_directory(directory)
    write_json(directory / STATE, begun)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made ({error.strerror}).") from error


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keep a second run of the same pipeline out."""
    with open(output / LOCK, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ZerolmError(
                f"{output}: another run is at work there. Wait for it, or choose another output."
            ) from error
        yield


def _show_plan(recipe: Any, executor: str, workers: int) -> None:
    from data_prep.units import plan_units

    print(f"recipe    {recipe.path}")
    print(f"output    {recipe.output}")
    print(f"executor  {executor}, at most {workers:,} tasks at a time")
    for source in recipe.sources:
        sizes = [each.size_bytes for each in source.inputs]
        size = "of unknown size" if None in sizes else f"{sum(sizes) / 1e6:,.1f} MB"
        units = plan_units(source.inputs, recipe.clean.unit_bytes)
        print(f"{source.name}: {len(sizes):,} inputs, {size}, {len(units):,} tasks a stage")
        pipeline = Pipeline(recipe, source, None)
        for stage in pipeline.left_out():
            print(f"    {stage:<14}{LEFT_OUT}")
        for stage, state in pipeline.states().items():
            print(f"    {stage:<14}{state}")
            for line in _options_of(recipe, stage):
                print(f"        {line}")


def _options_of(recipe: Any, stage: str) -> Sequence[str]:
    if stage == "clean":
        return [json.dumps(each) for each in recipe.clean.filters] or ["no filters"]
    options = recipe.shards if stage == "shards" else getattr(recipe, stage)
    return [f"{key}: {value}" for key, value in asdict(options).items()]
