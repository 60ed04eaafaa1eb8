"""Trains a tokenizer on inputs or pipeline stages, and writes a report on it."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.files.documents import InputRules
from data_prep.files.inputs import Input, total_bytes
from data_prep.read.bad_input import Tally
from data_prep.read.discovery import find_inputs
from data_prep.read.stage_files import read_stage
from data_prep.tasks.progress import Progress
from data_prep.tokenizer import text_sample
from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from data_prep.tokenizer.encoders import Encoder, load_encoder
from data_prep.tokenizer.report import measure_tokenizer
from data_prep.tokenizer.text_sample import Sample
from data_prep.tokenizer.vocabulary import token_texts, unknown_id
from zerolm.common.errors import ConfigError
from zerolm.common.files import write_json
from zerolm.data.window_text import load_decoder

REPORT_FILE = "report.json"
REPORT_BYTES = 4_000_000  # size of the text sample for the report


@dataclass(frozen=True)
class TrainingResult:
    """The result of training a tokenizer, and the amount of text used.

    Attributes:
        vocab_size: the size reached.
        num_documents, num_bytes: documents trained on, and their size in UTF-8.
        read_documents, read_bytes: the same for all documents that were read, even if only a sample
            was used.
    """

    vocab_size: int
    num_documents: int
    num_bytes: int
    read_documents: int
    read_bytes: int
    tally: Tally
    seconds: float


def train_on_inputs(
    inputs: Sequence[Input],
    rules: InputRules,
    options: BpeOptions,
    sample_bytes: int,
    output: Path,
) -> TrainingResult:
    """Train on all documents of the inputs, or on a sample of `sample_bytes` if it is not 0."""
    progress, tally = Progress("train-tokenizer", total_bytes(inputs)), Tally()
    sample = Sample(sample_bytes or REPORT_BYTES, text_sample.source_names(inputs))
    read = text_sample.read_texts(inputs, rules, tally, progress.add)
    texts = text_sample.add_to_sample(sample, read)

    def all_texts() -> Iterator[str]:
        yield from texts
        progress.close()
        if not progress.num_documents:
            raise ConfigError("--input: no documents to train on.")

    if not sample_bytes:
        vocab_size = train_bpe(all_texts(), options, output, sys.stderr.isatty())
        num_documents, num_bytes = progress.num_documents, sample.num_bytes
    else:
        deque(all_texts(), maxlen=0)
        sampled = list(chain.from_iterable(sample.by_source().values()))
        vocab_size = train_bpe(sampled, options, output, sys.stderr.isatty())
        num_documents, num_bytes = len(sampled), sample.kept_bytes
    write_report(output, sample.by_source(REPORT_BYTES))
    return TrainingResult(
        vocab_size=vocab_size,
        num_documents=num_documents,
        num_bytes=num_bytes,
        read_documents=progress.num_documents,
        read_bytes=sample.num_bytes,
        tally=tally,
        seconds=progress.seconds,
    )


def train_on_stages(
    stages: Sequence[Path],
    names: Sequence[str],
    options: BpeOptions,
    sample_bytes: int,
    output: Path,
) -> TrainingResult:
    """Train on the documents of pipeline stages; `names` are the names of the stages' sources."""
    inputs: list[Input] = []
    for directory, name in zip(stages, names, strict=True):
        field = read_stage(directory).text_field
        found, _ = find_inputs([str(directory)], field)
        inputs += (replace(each, argument=name, text_field=field) for each in found)
    return train_on_inputs(inputs, InputRules(), options, sample_bytes, output)


def write_report(directory: Path, texts: dict[str, list[str]]) -> None:
    """Measure a tokenizer on documents by source, and write `report.json` next to the tokenizer."""
    size = max(token_texts(directory)) + 1
    write_json(
        directory / REPORT_FILE, measure_copy(directory, load_encoder(directory), size, texts)
    )


def measure_copy(
    directory: Path, encoder: Encoder, vocab_size: int, texts: dict[str, list[str]]
) -> dict[str, Any]:
    """Measure a tokenizer's saved copy on documents by source, and return the report."""
    return measure_tokenizer(
        encoder.encode, vocab_size, token_texts(directory), texts, unknown_id(directory),
        load_decoder(directory),
    )  # fmt: skip
