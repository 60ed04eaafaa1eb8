"""Train a tokenizer on the documents of inputs, and report on it: for its command, and recipes."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep import text_sample
from data_prep.bad_input import Tally
from data_prep.documents import InputRules
from data_prep.encoders import load_encoder
from data_prep.progress import Progress
from data_prep.readers import Input
from data_prep.sources import find_inputs
from data_prep.stage_files import read_stage
from data_prep.tokenizer_files import spellings
from data_prep.tokenizer_report import measure
from data_prep.tokenizer_training import Recipe, train_tokenizer
from zerolm.errors import ConfigError
from zerolm.files import write_json

REPORT_FILE = "report.json"
REPORT_BYTES = 4_000_000  # of text, which a report on a new tokenizer is made from


@dataclass(frozen=True)
class Trained:
    """What a tokenizer was trained on, and what became of it."""

    vocab_size: int  # reached
    num_documents: int  # trained on
    num_bytes: int
    read_documents: int
    read_bytes: int  # of text
    tally: Tally
    seconds: float


def train_on(
    parts: Sequence[tuple[Sequence[Input], InputRules]],
    recipe: Recipe,
    sample_bytes: int,
    output: Path,
) -> Trained:
    """Train on the documents of inputs, or on a sample of them where `sample_bytes` is not 0.

    Args:
        parts: inputs, and how these are read.

    Raises:
        ConfigError: bad input, or no documents.
    """
    inputs = [each for part, _ in parts for each in part]
    sizes = [each.size_bytes for each in inputs]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    progress, tally = Progress("train-tokenizer", total), Tally()
    samples = text_sample.make_samples(inputs, sample_bytes or REPORT_BYTES)
    read = (text_sample.read_texts(part, rules, tally, progress.add) for part, rules in parts)
    texts = text_sample.through(samples, chain.from_iterable(read))

    def all_texts() -> Iterator[str]:
        yield from texts
        progress.close()
        if not progress.num_documents:
            raise ConfigError("--input: no documents to train on.")

    chosen: Any = all_texts()
    if sample_bytes:
        for _ in chosen:
            pass
        chosen = [text for each in samples.values() for text in each.texts()]
    reached = train_tokenizer(chosen, recipe, output, sys.stderr.isatty())
    kept = sum(each.kept_bytes for each in samples.values())
    whole = sum(each.num_bytes for each in samples.values())
    write_report(output, {name: each.texts() for name, each in samples.items()})
    return Trained(
        reached,
        len(chosen) if sample_bytes else progress.num_documents,
        kept if sample_bytes else whole,
        progress.num_documents,
        whole,
        tally,
        progress.seconds,
    )


def train_on_stages(
    stages: Sequence[Path], names: Sequence[str], recipe: Recipe, sample_bytes: int, output: Path
) -> Trained:
    """Train on the documents of stages, each a source with a name for the report."""
    parts = []
    for directory, name in zip(stages, names, strict=True):
        field = read_stage(directory).text_field
        found, _ = find_inputs([str(directory)], field)
        parts.append(([replace(each, argument=name) for each in found], InputRules(field)))
    return train_on(parts, recipe, sample_bytes, output)


def write_report(directory: Path, texts: dict[str, list[str]]) -> None:
    """Write `report.json` of a tokenizer beside it, from texts by source."""
    limit = REPORT_BYTES  # a sample for training may be large; its first documents are one too
    total = max(1, sum(map(len, texts.values())))
    texts = {name: _first(each, limit * len(each) // total) for name, each in texts.items()}
    known = spellings(directory)
    report = measure(load_encoder(directory).encode, max(known) + 1, known, texts)
    write_json(directory / REPORT_FILE, report)


def _first(texts: list[str], limit_bytes: int) -> list[str]:
    size, number = 0, 0
    while number < len(texts) and size < limit_bytes:
        size += len(texts[number].encode())
        number += 1
    return texts[:number]
