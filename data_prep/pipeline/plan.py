"""What decides the result of each stage of a pipeline, and the plan that `run --check` shows."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from data_prep.decontaminate import identity as decontaminate_identity
from data_prep.dedup import identity as dedup_identity
from data_prep.filters import identity
from data_prep.phases import fingerprint
from data_prep.units import fingerprint as inputs_fingerprint
from data_prep.units import plan_units
from zerolm.provenance import versions


def stage_keys(recipe: Any, source: Any, tokenizer: str) -> dict[str, str]:
    """Return the stages of a source in order, each with a fingerprint of all that decides it.

    Args:
        recipe, source: recipe.Recipe, recipe.Source.
        tokenizer: fingerprint of it.
    """
    key = inputs_fingerprint(source.inputs, source.options.rules())
    keys = {}
    for stage in recipe.stages:
        own: Any = None
        if stage == "clean":
            own = [recipe.content.get("clean", {}), identity(recipe.clean.filters)]
        elif stage == "dedup":
            own = dedup_identity(recipe.dedup)
        elif stage == "decontaminate":
            own = decontaminate_identity(recipe.decontaminate)
        elif stage == "shards":
            own = [asdict(recipe.shards), tokenizer]
        elif stage == "pack":
            own = asdict(recipe.pack)
        keys[stage] = key = fingerprint([key, stage, own])
    return keys


def tokenizer_key(options: Any, texts: Sequence[str]) -> str:
    """Return a fingerprint of all that decides a tokenizer that is trained.

    Args:
        options: recipe_options.TokenizerOptions.
        texts: keys of the stages that it is trained on.
    """
    return fingerprint([asdict(options), versions().get("tokenizers"), list(texts)])


def show_plan(
    recipe: Any, executor: str, workers: int, pipelines: Sequence[Any], training: Any
) -> None:
    """Print what a run would do: stages with their states, tasks, bytes, options."""
    print(f"recipe    {recipe.path}")
    print(f"output    {recipe.output}")
    print(f"executor  {executor}, at most {workers:,} tasks at a time")
    if training is not None:
        print(f"tokenizer trained on what is left of all sources: {training.state}")
        for key, value in asdict(recipe.training).items():
            print(f"        {key}: {value}")
    for pipeline in pipelines:
        source = pipeline.source
        sizes = [each.size_bytes for each in source.inputs]
        size = "of unknown size" if None in sizes else f"{sum(sizes) / 1e6:,.1f} MB"
        units = plan_units(source.inputs, recipe.clean.unit_bytes)
        print(f"{source.name}: {len(sizes):,} inputs, {size}, {len(units):,} tasks a stage")
        for stage in pipeline.left_out():
            print(f"    {stage:<14}is not in the recipe now, and stays as it is")
        for stage, state in pipeline.states().items():
            print(f"    {stage:<14}{state}")
            for line in _options_of(recipe, stage):
                print(f"        {line}")


def _options_of(recipe: Any, stage: str) -> Sequence[str]:
    if stage == "clean":
        return [json.dumps(each) for each in recipe.clean.filters] or ["no filters"]
    options = recipe.shards if stage == "shards" else getattr(recipe, stage)
    return [f"{key}: {value}" for key, value in asdict(options).items()]
