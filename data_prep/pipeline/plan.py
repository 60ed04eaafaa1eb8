"""Fingerprints of a pipeline's stages, and the plan that `run --check` prints."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from data_prep.dedup.decontaminate import decontaminate_identity
from data_prep.dedup.dedup import dedup_identity
from data_prep.filters.build import filters_identity
from data_prep.pipeline.recipe import Recipe, Source
from data_prep.pipeline.recipe_options import SourceOptions, TokenizerOptions
from data_prep.read.work_units import inputs_fingerprint, plan_units
from data_prep.tasks.phases import fingerprint
from zerolm.common.provenance import versions


def stage_fingerprints(
    recipe: Recipe, source: Source, tokenizer: str, dedup: Mapping[str, str]
) -> dict[str, str]:
    """Return a fingerprint for each stage of a source, in order.

    A fingerprint covers everything that determines the stage's result: the inputs, the stage's
    options, and all earlier stages.
    """
    before = _clean_fingerprint(recipe, source)
    fingerprints = {"clean": before}
    for stage in recipe.stages[1:]:
        options: Any = None
        if stage == "dedup":
            fingerprints[stage] = before = dedup[source.name]
            continue
        if recipe.decontaminate is not None and stage == "decontaminate":
            options = decontaminate_identity(recipe.decontaminate)
        elif recipe.shards is not None and stage == "shards":
            options = asdict(recipe.shards) | {"val_fraction": recipe.val_fraction(source)}
            del options["max_unknown"]  # this option does not affect the content of shards
            if not options["bos"]:  # absent in earlier releases
                del options["bos"]
            options = [options, tokenizer]
        elif recipe.pack is not None and stage == "pack":
            options = asdict(recipe.pack)
        fingerprints[stage] = before = fingerprint([before, stage, options])
    return fingerprints


def _clean_fingerprint(recipe: Recipe, source: Source) -> str:
    inputs = inputs_fingerprint(source.inputs, source.options.rules())
    options = [recipe.content.get("clean", {}), filters_identity(recipe.clean.filters)]
    return fingerprint([inputs, "clean", options])


def dedup_fingerprints(recipe: Recipe) -> dict[str, str]:
    """Return the fingerprint of each source's dedup stage, which also covers earlier sources if
    documents are compared across sources.
    """
    found: dict[str, str] = {}
    if recipe.dedup is None:
        return found
    earlier: list[str] = []  # fingerprint of the last source, which covers all sources before it
    for source in recipe.by_preference():
        options = dedup_identity(recipe.dedup.of_stage(()), [*recipe.against, *earlier])
        key = fingerprint([_clean_fingerprint(recipe, source), "dedup", options])
        found[source.name] = key
        earlier = [key] if recipe.dedup.across_sources else []
    return found


def tokenizer_fingerprint(options: TokenizerOptions, stages: Sequence[str]) -> str:
    """Return a fingerprint of everything that determines a trained tokenizer.

    Args:
        stages: fingerprints of the stages that supply the training documents.
    """
    return fingerprint([asdict(options), versions().get("tokenizers"), list(stages)])


def print_plan(
    recipe: Recipe, executor: str, workers: int, pipelines: Sequence[Any], training: Any
) -> None:
    """Print what a run would do: each stage with its state, tasks, bytes and options.

    A stage has the same options for all sources, so the options are shown only for the first
    source.
    """
    print(f"recipe    {recipe.path}")
    print(f"output    {recipe.output}")
    print(f"executor  {executor}, at most {workers:,} tasks at a time")
    if recipe.training is not None:
        print(f"tokenizer trained on the documents that all sources keep: {training.state}")
        for key, value in asdict(recipe.training).items():
            print(f"        {key}: {value}")
    shown: set[str] = set()
    for pipeline in pipelines:
        source = pipeline.source
        sizes = [each.size_bytes for each in source.inputs]
        size = "of unknown size" if None in sizes else f"{sum(sizes) / 1e6:,.1f} MB"
        units = plan_units(source.inputs, recipe.clean.unit_bytes)
        print(f"{source.name}: {len(sizes):,} inputs, {size}, {len(units):,} tasks per stage")
        names = {"hub": "hub data sets", ".code": "source files"}
        kinds = Counter(names.get(each.suffix, each.suffix) for each in source.inputs)
        print(f"    {'read':<14}" + ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common()))
        for line in _reading_of(source.options):
            print(f"        {line}")
        for stage in pipeline.removed_stages():
            print(f"    {stage:<14}is no longer in the recipe; its files are kept")
        for stage, state in pipeline.states().items():
            print(f"    {stage:<14}{state}")
            for line in () if stage in shown else _options_of(recipe, stage):
                print(f"        {line}")
            shown.add(stage)


def _reading_of(options: SourceOptions) -> Sequence[str]:
    """Return a source's reading options that differ from the defaults."""
    default = SourceOptions(())
    return [
        f"{key}: {value}"
        for key, value in asdict(options).items()
        if key not in ("input", "val_fraction") and value != getattr(default, key)
    ]


def _options_of(recipe: Recipe, stage: str) -> Sequence[str]:
    options = getattr(recipe, stage)
    if stage == "clean":
        return [json.dumps(each) for each in options.filters] or ["no filters"]
    return [f"{key}: {value}" for key, value in asdict(options).items()]
