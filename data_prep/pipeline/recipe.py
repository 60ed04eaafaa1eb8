"""A recipe: one JSON file for a whole pipeline, checked as a whole before anything is written.

Paths are relative to the recipe. Every source goes through the same stages, each into a directory
of its own: `OUTPUT/SOURCE/clean`, `dedup`, `decontaminate`, `shards`. A tokenizer that is trained
is that of all sources, in `OUTPUT/tokenizer`. docs/data_pipeline.md has the keys;
`data_prep/recipes/` has examples.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.clean import CleanOptions
from data_prep.dedup import DedupOptions
from data_prep.filters import filter_problems, relative_to
from data_prep.recipe_options import PackOptions, ShardOptions, SourceOptions, TokenizerOptions
from data_prep.sources import HUB_ID, find_inputs
from data_prep.stage_options import options_from
from data_prep.stage_outputs import overlap_problems
from data_prep.tokenizer_training import Recipe as TokenizerRecipe
from data_prep.tokenizers import load_tokenizer
from zerolm.errors import ConfigError, did_you_mean

KEYS = (
    *("output", "sources", "clean", "dedup", "decontaminate", "train_tokenizer", "tokenize"),
    *("pack", "executor"),
)
CLEAN_KEYS = ("filters", "keep_dropped", "unit_bytes")
STAGES = ("clean", "dedup", "decontaminate", "shards", "pack")
TOKENIZER = "tokenizer"  # directory of the one that a pipeline trains
SOURCE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")

Json = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A source with its files."""

    name: str
    options: SourceOptions
    inputs: tuple[Any, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """A recipe that can be run."""

    path: Path
    content: Json
    output: Path
    sources: tuple[Source, ...]
    clean: CleanOptions  # its rules are those of each source
    dedup: DedupOptions | None
    decontaminate: Any  # its DecontaminateOptions, or None
    shards: ShardOptions | None
    tokenizer: Any  # loaded, where there are shards; None if it is to be trained
    training: TokenizerOptions | None
    pack: PackOptions | None
    executor: Json  # options of Slurm or Ray

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of each source, in order."""
        given = (self.dedup, self.decontaminate, self.shards, self.pack)
        left_out = [each is None for each in given]
        return ("clean", *(name for name, out in zip(STAGES[1:], left_out, strict=True) if not out))

    def provenance(self) -> Json:
        """Return what every stage and manifest says about the recipe: all but its executor.

        How tasks are run changes no result, and its options may hold secrets.
        """
        text = self.path.read_bytes()
        return {
            "file": self.path.name,
            "sha256": hashlib.sha256(text).hexdigest(),
            "content": {key: self.content[key] for key in self.content if key != "executor"},
        }


def read_recipe(path: Path) -> Recipe:
    """Read a recipe and check all of it: keys, values, filters, inputs, tokenizer, output.

    Raises:
        ConfigError: every problem.
    """
    from data_prep.decontaminate import DecontaminateOptions

    content = _load(path)
    problems = [
        f"{path}: {key!r} is not a key of a recipe.{did_you_mean(key, KEYS)} "
        f"There are {', '.join(KEYS)}."
        for key in content
        if key not in KEYS
    ]
    base = path.parent.resolve()  # the same from wherever the recipe is run, on every machine
    kinds: dict[str, Any] = {
        "dedup": DedupOptions,
        "decontaminate": DecontaminateOptions,
        "tokenize": ShardOptions,
        "train_tokenizer": TokenizerOptions,
        "pack": PackOptions,
    }
    found: dict[str, Any] = dict.fromkeys(kinds)
    for key, kind in kinds.items():
        if key in content:
            found[key] = _collect(problems, options_from, kind, content[key], f"{path}: {key}")
    clean = _clean(content.get("clean", {}), f"{path}: clean", base, problems)
    output = content.get("output")
    if not isinstance(output, str) or not output:
        problems.append(f"{path}: output: {output!r} is not a directory's path.")
        output = "."
    elif (base / output).exists() and not (base / output).is_dir():
        problems.append(f"{path}: output: {base / output} is a file.")
    executor = content.get("executor", {})
    if not isinstance(executor, dict):
        problems.append(f"{path}: executor: {executor!r} is not an object of options.")
    if found["decontaminate"] is not None:
        found["decontaminate"] = found["decontaminate"].relative_to(base)
        _collect(problems, found["decontaminate"].read_items)
    tokenizer = None
    problems += _tokenizer_problems(content, found, f"{path}")
    if found["tokenize"] is not None and (name := found["tokenize"].tokenizer):
        if os.path.lexists(base / name) or os.path.lexists(name):  # else an id, or an encoding
            name = str(base / name)
        tokenizer = _collect(problems, load_tokenizer, name)
    sources = tuple(_sources(content.get("sources"), path, base, problems))
    problems += _overlaps(path, base, output, sources)
    if problems:
        raise ConfigError(problems)
    return Recipe(
        path, content, base / output, sources, clean, found["dedup"], found["decontaminate"],
        found["tokenize"], tokenizer, found["train_tokenizer"], found["pack"], executor,
    )  # fmt: skip


def _load(path: Path) -> Json:
    def no_twins(pairs: list[tuple[str, Any]]) -> Json:
        for key, _ in pairs:
            if sum(key == other for other, _ in pairs) > 1:
                raise ValueError(f"the key {key!r} is there twice")
        return dict(pairs)

    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_twins)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is not a JSON object. data_prep/recipes/ has examples.")
    return content


def _collect(problems: list[str], step: Any, *arguments: Any) -> Any:
    try:
        return step(*arguments)
    except ConfigError as error:
        problems += error.problems
        return None


def _tokenizer_problems(content: Json, found: Mapping[str, Any], where: str) -> list[str]:
    """Say what is wrong between the keys that make a tokenizer and those that need one."""
    problems = []
    training = found["train_tokenizer"]
    if training is not None:
        recipe = training_recipe(training)
        lines = recipe.problems()
        problems += [f"{where}: train_tokenizer.{line.removeprefix('--')}" for line in lines]
        if "tokenize" not in content:
            problems.append(f"{where}: train_tokenizer: needs tokenize too, which uses it.")
        if TOKENIZER in (content.get("sources") or ()):
            problems.append(
                f"{where}: sources.{TOKENIZER}: is where the tokenizer goes. Rename it."
            )
    if "pack" in content and "tokenize" not in content:
        problems.append(f"{where}: pack: needs tokenize too, whose shards it packs.")
    given = bool(found["tokenize"] and found["tokenize"].tokenizer)
    if found["tokenize"] is not None and given == ("train_tokenizer" in content):
        problems.append(
            f"{where}: tokenize.tokenizer: is needed, or else train_tokenizer; one of them."
        )
    return problems


def training_recipe(options: TokenizerOptions) -> TokenizerRecipe:
    """Return what the tokenizer of a pipeline is trained to be."""
    return TokenizerRecipe(
        options.vocab_size,
        options.split,
        options.digits or None,
        options.whitespace,
        options.special_tokens,
        options.min_frequency,
    )


def _clean(given: Any, where: str, base: Path, problems: list[str]) -> CleanOptions:
    if not isinstance(given, Mapping):
        problems.append(f"{where}: {given!r} is not an object of options.")
        return CleanOptions()
    problems += [
        f"{where}.{key}: is not an option.{did_you_mean(key, CLEAN_KEYS)} "
        f"There are {', '.join(CLEAN_KEYS)}."
        for key in given
        if key not in CLEAN_KEYS
    ]
    filters = relative_to(base, given.get("filters", []))
    problems += filter_problems(filters, f"{where}.filters")
    if not isinstance(given.get("keep_dropped", False), bool):
        problems.append(f"{where}.keep_dropped: {given['keep_dropped']!r} is not true or false.")
    size = given.get("unit_bytes")
    if size is not None and not (isinstance(size, int | float) and 1 <= size < 1 << 63):
        problems.append(f"{where}.unit_bytes: {size!r} is not a number of bytes.")
        size = None
    keep = Path("dropped") if given.get("keep_dropped") is True else None
    unit_bytes = None if size is None else int(size)
    return CleanOptions(tuple(filters) if isinstance(filters, list) else (), unit_bytes=unit_bytes,
                        keep_dropped=keep)  # fmt: skip


def _sources(given: Any, path: Path, base: Path, problems: list[str]) -> Iterator[Source]:
    where = f"{path}: sources"
    if not isinstance(given, dict) or not given:
        problems.append(f"{where}: is not an object with at least one source: its name, and input.")
        return
    for name, options in given.items():
        if not SOURCE_NAME.fullmatch(name):
            problems.append(f"{where}.{name}: is not a name of letters, digits, '_', '.' and '-'.")
            continue
        chosen = _collect(problems, options_from, SourceOptions, options, f"{where}.{name}")
        if chosen is None:
            continue
        arguments = [from_recipe(base, each) for each in chosen.input]
        found = _collect(
            problems, find_inputs, arguments, chosen.text_field, chosen.on_bad_input == "skip"
        )
        if found is not None:
            yield Source(name, chosen, tuple(found[0]), tuple(found[1]))


def _overlaps(path: Path, base: Path, output: str, sources: tuple[Source, ...]) -> list[str]:
    """Say which sources would read what the pipeline writes."""
    problems = []
    for read in sources:
        arguments = [from_recipe(base, each) for each in read.options.input]
        where = f"{path}: sources.{read.name}: output"
        for written in sources:
            target = base / output / written.name
            problems += overlap_problems(target, arguments, read.inputs, where)
    return problems


def from_recipe(base: Path, argument: str) -> str:
    """Return the absolute path of a path or glob of a recipe; ids of the hub stay as they are."""
    local = str(base / argument)
    if HUB_ID.fullmatch(argument) and not os.path.lexists(local) and not os.path.lexists(argument):
        return argument
    return local
