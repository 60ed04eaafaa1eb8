"""Reads a recipe: the JSON file that describes a pipeline, checked completely before it runs.

Paths are relative to the recipe. Every source passes through the same stages, each with its own
directory: `OUTPUT/SOURCE/clean`, `dedup`, ..., `shards`. If the pipeline trains a
tokenizer, all sources share it, in `OUTPUT/tokenizer`. docs/data_pipeline.md lists the keys;
`data_prep/recipes/` contains examples.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.dedup.dedup import open_against
from data_prep.dedup.evaluation_items import read_all_items
from data_prep.dedup.options import DecontaminateOptions
from data_prep.encode.held_out import held_out_problem
from data_prep.filters.clean import CleanOptions
from data_prep.filters.parameters import filter_problems, resolve_model_paths
from data_prep.pipeline.recipe_options import (
    PackOptions,
    ShardOptions,
    SourceOptions,
    SourcesDedupOptions,
    TokenizerOptions,
    tokenizer_problems,
)
from data_prep.read.discovery import HUB_ID, find_inputs
from data_prep.read.readers import Input
from data_prep.stages.options import option, parse_options
from data_prep.stages.output_rules import Outputs
from data_prep.tokenizer.load import Tokenizer, load_tokenizer, require_bos
from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.common.records import read_json
from zerolm.common.url import is_url

# Keys whose values are parsed into a dataclass of options.
OPTION_KEYS: dict[str, type] = {
    "dedup": SourcesDedupOptions,
    "decontaminate": DecontaminateOptions,
    "train_tokenizer": TokenizerOptions,
    "tokenize": ShardOptions,
    "pack": PackOptions,
}
KEYS = ("output", "sources", "clean", *OPTION_KEYS, "executor")
STAGES = ("clean", "dedup", "decontaminate", "shards", "pack")
SOURCE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")

Json = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A source with its inputs, and notes on the inputs for the user."""

    name: str
    options: SourceOptions
    inputs: tuple[Input, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """A valid recipe.

    Attributes:
        clean: options for the clean stage; each source sets its own input rules.
        against: ids of the signatures that the documents of all sources are compared with.
        shards: None if the pipeline ends before tokenization.
        tokenizer: the existing tokenizer; None if the pipeline trains one or ends before
            tokenization.
        training: options for the tokenizer to train; None if the pipeline trains none.
        executor: options of Slurm.
    """

    path: Path
    content: Json
    output: Path
    sources: tuple[Source, ...]
    clean: CleanOptions
    dedup: SourcesDedupOptions | None
    against: tuple[str, ...]
    decontaminate: DecontaminateOptions | None
    shards: ShardOptions | None
    tokenizer: Tokenizer | None
    training: TokenizerOptions | None
    pack: PackOptions | None
    executor: Json

    def val_fraction(self, source: Source) -> float:
        """Return the fraction of a source's documents to hold out; 0 if none are held out."""
        if self.shards is None:
            return 0.0
        own = source.options.val_fraction
        return self.shards.val_fraction if own is None else own

    def sources_before(self, source: Source) -> tuple[Source, ...]:
        """Return, in order, the sources that a source is compared with to find duplicates."""
        if self.dedup is None or not self.dedup.across_sources:
            return ()
        order = self.by_preference()
        return order[: [each.name for each in order].index(source.name)]

    def by_preference(self) -> tuple[Source, ...]:
        """Return the sources in order of preference; of duplicates, the document in the earliest is
        kept.
        """
        if self.dedup is None or not self.dedup.source_order:
            return self.sources
        place = {name: number for number, name in enumerate(self.dedup.source_order)}
        return tuple(sorted(self.sources, key=lambda source: place[source.name]))

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of each source, in order."""
        options = self.clean, self.dedup, self.decontaminate, self.shards, self.pack
        return tuple(
            stage for stage, given in zip(STAGES, options, strict=True) if given is not None
        )

    def provenance(self) -> Json:
        """Return what stages and manifests record about the recipe: everything except the executor.

        The executor does not affect results, and its options may contain secrets.
        """
        text = self.path.read_bytes()
        return {
            "file": self.path.name,
            "sha256": hashlib.sha256(text).hexdigest(),
            "content": {key: self.content[key] for key in self.content if key != "executor"},
        }


def read_recipe(path: Path) -> Recipe:
    """Read a recipe and check it completely: keys, values, filters, inputs, tokenizer, output."""
    content = read_json(path, "a recipe; see the examples in data_prep/recipes/")
    problems = [
        f"{path}: {key!r} is not a key of a recipe.{did_you_mean(key, KEYS)} "
        f"Known: {', '.join(KEYS)}."
        for key in content
        if key not in KEYS
    ]
    base = path.parent.resolve()  # a recipe has the same meaning in any working directory
    options: dict[str, Any] = dict.fromkeys(OPTION_KEYS)
    for key, kind in OPTION_KEYS.items():
        if key in content:
            options[key] = _collect(problems, parse_options, kind, content[key], f"{path}: {key}")
    clean = _clean(content.get("clean", {}), f"{path}: clean", base, problems)
    output = content.get("output")
    if not isinstance(output, str) or not output:
        problems.append(f"{path}: output: {output!r} is not the path of a directory.")
        output = "."
    elif (base / output).exists() and not (base / output).is_dir():
        problems.append(f"{path}: output: {base / output} is a file. Give a directory.")
    executor = content.get("executor", {})
    if not isinstance(executor, dict):
        problems.append(f"{path}: executor: {executor!r} is not an object of options.")
    if options["decontaminate"] is not None:
        options["decontaminate"] = options["decontaminate"].relative_to(base)
        _collect(problems, read_all_items, options["decontaminate"].evaluation)
    against = ()
    if options["dedup"] is not None:
        options["dedup"] = options["dedup"].relative_to(base)
        found = _collect(problems, open_against, options["dedup"]) or ()
        against = tuple(each.id for each in found)
        names = list(content.get("sources") or ())
        found = options["dedup"].problems_with_sources(names, base / output)
        problems += [f"{path}: dedup.{problem}" for problem in found]
    problems += tokenizer_problems(content, options, f"{path}")
    tokenizer = None
    if options["tokenize"] is not None and options["tokenize"].tokenizer:
        name = _tokenizer_name(base, options["tokenize"].tokenizer)
        tokenizer = _collect(problems, load_tokenizer, name)
        if tokenizer is not None and options["tokenize"].bos:
            _collect(problems, require_bos, tokenizer)
    sources = tuple(_sources(content.get("sources"), path, base, problems))
    problems += _overlaps(path, base, output, sources)
    if problems:
        raise ConfigError(problems)
    recipe = Recipe(
        path, content, base / output, sources, clean, options["dedup"], against,
        options["decontaminate"], options["tokenize"], tokenizer,
        options["train_tokenizer"], options["pack"], executor,
    )  # fmt: skip
    for source in sources:
        arguments = source.inputs, source.options.rules(), recipe.val_fraction(source)
        if problem := _collect(problems, held_out_problem, *arguments):
            problems.append(f"{path}: sources.{source.name}.val_fraction: {problem}")
    if problems:
        raise ConfigError(problems)
    return recipe


def _tokenizer_name(base: Path, name: str) -> str:
    """Make the path of a tokenizer directory absolute; return hub ids and encodings unchanged."""
    if os.path.lexists(base / name) or os.path.lexists(name):
        return str(base / name)
    return name


def _collect(problems: list[str], function: Any, *arguments: Any) -> Any:
    """Call a function; return its result, or None after adding the problems of a ConfigError."""
    try:
        return function(*arguments)
    except ConfigError as error:
        problems += error.problems
        return None


@dataclass(frozen=True)
class _Clean:
    """The options under a recipe's key `clean`."""

    filters: list = ()  # type: ignore[assignment]
    keep_dropped: bool = False
    unit_bytes: int | None = option(None, low=1)


def _clean(given: Any, where: str, base: Path, problems: list[str]) -> CleanOptions:
    """Parse a recipe's key `clean`, and return the options for the clean stage."""
    options = _collect(problems, parse_options, _Clean, given, where) or _Clean()
    filters = given.get("filters", []) if isinstance(given, dict) else []
    filters = resolve_model_paths(base, filters)
    problems += filter_problems(filters, f"{where}.filters") if isinstance(filters, list) else []
    return CleanOptions(
        tuple(filters),
        unit_bytes=options.unit_bytes,
        keep_dropped=Path("dropped") if options.keep_dropped else None,
    )


def _sources(given: Any, path: Path, base: Path, problems: list[str]) -> Iterator[Source]:
    where = f"{path}: sources"
    if not isinstance(given, dict) or not given:
        problems.append(
            f'{where}: is not an object with at least one source. Example: {{"web": {{"input": '
            f'["web/*.jsonl"]}}}}.'
        )
        return
    for name, options in given.items():
        if not SOURCE_NAME.fullmatch(name):
            problems.append(
                f"{where}.{name}: a name may contain only letters, digits, '_', '.' and '-'."
            )
            continue
        chosen = _collect(problems, parse_options, SourceOptions, options, f"{where}.{name}")
        if chosen is None:
            continue
        arguments = [from_recipe(base, each) for each in chosen.input]
        skip = chosen.on_bad_input == "skip"
        found = _collect(
            problems, find_inputs, arguments, chosen.text_field, skip, chosen.encoding, chosen.code
        )
        if found is not None:
            yield Source(name, chosen, tuple(found[0]), tuple(found[1]))


def _overlaps(path: Path, base: Path, output: str, sources: tuple[Source, ...]) -> list[str]:
    """Return a problem for each source that would read the pipeline's own output."""
    outputs = Outputs(base / output / each.name for each in sources)
    problems = []
    for source in sources:
        arguments = [from_recipe(base, each) for each in source.options.input]
        where = f"{path}: sources.{source.name}: output"
        problems += outputs.problems(arguments, source.inputs, where)
    return problems


def from_recipe(base: Path, argument: str) -> str:
    """Make a path or glob in a recipe absolute; return URLs and hub ids unchanged."""
    if is_url(argument):
        return argument
    local = str(base / argument)
    if HUB_ID.fullmatch(argument) and not os.path.lexists(local) and not os.path.lexists(argument):
        return argument
    return local
