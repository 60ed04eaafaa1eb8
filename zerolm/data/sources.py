"""The shard directories that a run reads: opened, weighted, named, and fit for the model.

Reads manifests, and an index of packed rows; what the tokens are is shards.py's affair, their
order order.py's.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zerolm.errors import ConfigError, ShardError, did_you_mean
from zerolm.mixture import tempered
from zerolm.order import exact_shares, num_windows
from zerolm.packing import open_packing
from zerolm.settings import BEST_FIT, Settings, split_weight
from zerolm.shards import MANIFEST, Source, open_source
from zerolm.url import is_url


class Sources(NamedTuple):
    """Training sources with their weights, and validation sources."""

    training: list[Source]
    weights: list[float]
    validation: list[Source]


def open_sources(settings: Settings, problems: list[str]) -> Sources:
    """Open whatever can be opened of `--data` and `--val_data`; the rest goes to `problems`.

    Without any weights the sources are drawn in proportion to their tokens, or to the root of them
    that `--mixture_temperature` says.
    """
    where = settings.where("data")
    paths: list[str] = []
    given: list[float | None] = []
    for spec in settings.data:
        try:
            path, weight = split_weight(spec)
        except ValueError:
            path, weight = spec, None  # "=" may be part of a name
            if not is_url(spec) and not Path(spec).exists():
                problems.append(
                    f"{where}: {spec}, its weight is not a number. Write for example "
                    f"{spec.rpartition('=')[0]}=0.7."
                )
                continue
        if weight is not None and (weight < 0 or (weight == 0 and not settings.data_stage)):
            problems.append(
                f"{where}: {spec}, a weight must be above 0. Correct it, or leave the source out."
            )
        paths.append(path)
        given.append(weight)
    training = _open("data", paths, problems)
    validation = _open("val_data", settings.val_data, problems)
    bare = [path for path, weight in zip(paths, given, strict=True) if weight is None]
    if not bare:
        weights = [weight for weight in given if weight is not None]
    else:
        if len(bare) < len(paths):
            problems.append(
                f"{where}: {bare[0]}, has no weight while others have. Give all of them one, or "
                f"none for shares by size."
            )
        sizes = [source.num_tokens for source in training]
        weights = tempered(sizes, settings.mixture_temperature or 1.0)
    if settings.mixture_temperature is not None and len(bare) < len(paths):
        problems.append(
            f"{settings.where('mixture_temperature')}: {settings.mixture_temperature:g}, makes "
            f"weights of sizes, but --data gives weights. Remove one of them."
        )
    if len(weights) == len(training) and min(weights, default=0) >= 0 and any(weights):
        if 0 in weights and not settings.data_stage:
            return Sources(training, weights, validation)  # it was said above
        try:
            exact_shares(weights, where, may_rest=bool(settings.data_stage))
        except ConfigError as error:
            problems += error.problems
    return Sources(training, weights, validation)


def _open(flag: str, paths: Sequence[str], problems: list[str]) -> list[Source]:
    sources = []
    for path in paths:
        try:
            sources.append(open_source(path))
        except ShardError as error:
            problems += [f"{problem} (--{flag})" for problem in error.problems]
    return sources


def source_problems(
    sources: Sources, settings: Settings, vocab_size: int | None, seq_len: int | None
) -> list[str]:
    """Check every source against the model, the sequence length and the other sources.

    Args:
        vocab_size: of the model; None when it could not be read.
        seq_len: None when it is not known.
    """
    problems: list[str] = []
    everything = [("data", source) for source in sources.training]
    everything += [("val_data", source) for source in sources.validation]
    seen: dict[str, tuple[str, Source]] = {}
    for flag, source in everything:
        manifest = source.directory / MANIFEST
        if vocab_size is not None and source.vocab_size > vocab_size:
            problems.append(
                f"{manifest}: vocab_size: {source.vocab_size}, must not exceed the model's "
                f"vocab_size {vocab_size} ({settings.model_config}). Raise that, or tokenize with "
                f"the model's tokenizer."
            )
        if seq_len and settings.packing == BEST_FIT:
            try:
                packing = open_packing(source, seq_len)
                if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a node reads it all
                    damage = packing.damage()
                    problems += [f"{problem} (--{flag})" for problem in damage]
            except ShardError as error:
                problems += [f"{problem} (--{flag})" for problem in error.problems]
        elif seq_len and num_windows(source.num_tokens, seq_len) < 1:
            problems.append(
                f"{manifest}: num_tokens: {source.num_tokens}, must be at least --seq_len + 1 = "
                f"{seq_len + 1} for one sequence. Lower --seq_len, or add data."
            )
        problems += _tokenizer_problems(source, everything[0][1])
        if source.fingerprint in seen:
            other_flag, other = seen[source.fingerprint]
            why = "validation data must be held out" if other_flag != flag else "give it once"
            problems.append(
                f"{settings.where(flag)}: {source.directory}, holds the same tokens as "
                f"--{other_flag} {other.directory}: {why}. Remove one of them."
            )
        seen.setdefault(source.fingerprint, (flag, source))
    return problems


def _tokenizer_problems(source: Source, first: Source) -> list[str]:
    ours, theirs = (each.manifest["tokenizer"]["fingerprint"] for each in (source, first))
    if ours == theirs:
        return []
    return [
        f"{source.directory / MANIFEST}: tokenizer.fingerprint: {ours[:16]}, must equal that of "
        f"{first.directory}, {theirs[:16]}: another tokenizer made these ids. Tokenize both with "
        f"the same one."
    ]


def source_names(sources: Sequence[Source]) -> list[str]:
    """Return a name for each source, for metrics: its directory's, with parents where needed."""
    parts = [
        (source.directory if source.is_remote else source.directory.absolute()).parts
        for source in sources
    ]
    depth = 1
    while len({path[-depth:] for path in parts}) < len(parts) and depth < max(map(len, parts)):
        depth += 1
    return ["_".join(part.strip("/") for part in path[-depth:]) for path in parts]


def find_source(name: str, sources: Sequence[Source]) -> int:
    """Return the number of the source that a setting names: by its directory, or by its path.

    Raises:
        ValueError: none or several have that name.
    """
    names = source_names(sources)
    if name in names:
        return names.index(name)
    found = [
        number
        for number, source in enumerate(sources)
        if name in (source.directory.name, str(source.directory))
    ]
    if len(found) == 1:
        return found[0]
    if found:
        which = " or ".join(names[number] for number in found)
        raise ValueError(f"several sources are called {name}. Write {which}.")
    raise ValueError(
        f"no source is called {name!r}.{did_you_mean(name, names)} The sources are: "
        f"{', '.join(names)}."
    )
