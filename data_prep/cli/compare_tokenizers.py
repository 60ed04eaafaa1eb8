"""`python -m data_prep train-tokenizer` and `compare-tokenizers`: what they do and say."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.command_line import Problems
from data_prep.input_flags import input_rules
from data_prep.tokenizer_flags import COMPARED_BYTES

MIN_VOCAB_SIZE = 257  # every byte, and the EOS token
MAX_VOCAB_SIZE = 1 << 32


def train_tokenizer(options: argparse.Namespace) -> None:
    """Train a tokenizer, print the report on it, and write both."""
    from data_prep import sources
    from data_prep.bad_input import summary_lines
    from data_prep.tokenizer_report import report_lines
    from data_prep.tokenizer_run import REPORT_FILE, train_on
    from data_prep.tokenizer_training import Recipe
    from zerolm.shards import output_problems

    for number in (signal.SIGINT, signal.SIGTERM):  # while Rust computes, Python hears nothing;
        signal.signal(number, signal.SIG_DFL)  # nothing is written before the end
    problems = Problems()
    recipe = Recipe(
        problems.number("vocab_size", options.vocab_size, MIN_VOCAB_SIZE, MAX_VOCAB_SIZE),
        options.split,
        options.digits,
        options.whitespace,
        tuple(options.special_tokens),
        problems.number("min_frequency", options.min_frequency, 0),
    )
    sample_bytes = problems.number("sample_bytes", options.sample_bytes, 1)
    if not any(line.startswith("--vocab_size") for line in problems.lines):
        problems.lines += recipe.problems()
    rules = input_rules(options, problems)
    skip = rules.on_bad_input == "skip"
    found = problems.of(sources.find_inputs, options.input, options.text_field, skip)
    problems.lines += [f"--output {line}" for line in output_problems(options.output)]
    problems.refuse()
    inputs = _show_notes(*found)
    trained = train_on([(inputs, rules)], recipe, sample_bytes or 0, options.output)
    print(f"tokenizer   {options.output}: {trained.vocab_size:,} ids")
    size = f"{trained.num_bytes / 1e6:,.1f} MB of text"
    print(f"trained on  {trained.num_documents:,} documents, {size}")
    if sample_bytes:
        whole = f"{trained.read_bytes / 1e6:,.1f} MB"
        print(f"sampled     from {trained.read_documents:,} documents, {whole}")
    print(f"seconds     {trained.seconds:,.1f}")
    for line in summary_lines(inputs, trained.tally, rules):
        print(line)
    for line in report_lines(json.loads((options.output / REPORT_FILE).read_bytes())):
        print(line)
    if trained.vocab_size < recipe.vocab_size:
        print(
            f"note        --vocab_size {recipe.vocab_size:,} was not reached: the text has no more "
            f"pairs to merge. Set vocab_size {trained.vocab_size:,} in the model's config."
        )


def compare_tokenizers(options: argparse.Namespace) -> None:
    """Print a table of what several tokenizers make of the same sample of documents."""
    from data_prep import sources, text_sample, tokenizers
    from data_prep.bad_input import Tally, summary_lines
    from data_prep.progress import Progress
    from data_prep.tokenizer_report import as_html, as_text, comparison_rows
    from zerolm.files import write_atomically, write_json

    problems = Problems()
    sample_bytes = problems.number("sample_bytes", options.sample_bytes, 1, default=COMPARED_BYTES)
    if options.output is not None and options.output.suffix not in (".json", ".html"):
        problems.lines.append(f"--output {options.output}: is not a .json or .html file.")
    if len(set(options.tokenizer)) < len(options.tokenizer):
        problems.lines.append("--tokenizer: one is named twice. Name each once.")
    rules = input_rules(options, problems)
    skip = rules.on_bad_input == "skip"
    found = problems.of(sources.find_inputs, options.input, options.text_field, skip)
    loaded = [problems.of(tokenizers.load_tokenizer, name) for name in options.tokenizer]
    problems.refuse()
    inputs = _show_notes(*found)
    progress = Progress("compare-tokenizers", _total_bytes(inputs))
    tally = Tally()
    samples = text_sample.make_samples(inputs, sample_bytes)
    for source, text in text_sample.read_texts(inputs, rules, tally, progress.add):
        samples[source].add(text)
    progress.close()
    for line in summary_lines(inputs, tally, rules):
        print(line)
    texts = {name: sample.texts() for name, sample in samples.items()}
    reports = {each.name: _measure(each, texts) for each in loaded}
    rows = comparison_rows(reports)
    print(as_text(rows))
    if options.output is not None and options.output.suffix == ".json":
        write_json(options.output, reports)
    elif options.output is not None:
        page = as_html(rows).encode()
        write_atomically(options.output, lambda file: file.write(page))


def _measure(tokenizer: Any, texts: dict[str, list[str]]) -> dict[str, Any]:
    from data_prep.encoder_choice import choose_backend
    from data_prep.encoders import load_encoder
    from data_prep.tokenizer_files import spellings
    from data_prep.tokenizer_report import measure

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "tokenizer"
        tokenizer.write_copy(directory)
        num_bytes = sum(len(text.encode()) for each in texts.values() for text in each)
        choice = choose_backend(directory, input_bytes=num_bytes)
        encoder = load_encoder(directory, choice)
        start = time.perf_counter()
        for each in texts.values():
            encoder.encode(each)
        seconds = time.perf_counter() - start
        report = measure(encoder.encode, tokenizer.vocab_size, spellings(directory), texts)
    report["encoder"] = choice.backend
    report["megabytes_per_second"] = round(num_bytes / 1e6 / max(seconds, 1e-9), 2)
    return report


def _show_notes(inputs: list, notes: list[str]) -> list:
    for note in notes:
        print(note, file=sys.stderr)
    return inputs


def _total_bytes(inputs: Sequence[Any]) -> int | None:
    sizes = [each.size_bytes for each in inputs]
    return None if None in sizes else sum(sizes)
