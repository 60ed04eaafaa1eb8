"""`compare-tokenizers`: encode the same sample of documents with several tokenizers."""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from data_prep.cli.input_flags import add_input_flags, find_inputs, input_rules, print_notes
from data_prep.cli.problems import Problems

SAMPLE_BYTES = 8_000_000


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser)
    add = parser.add_argument
    add(
        "--tokenizer",
        required=True,
        nargs="+",
        action="extend",
        metavar="DIR",
        help="Hugging Face tokenizer directories or hub ids, or tiktoken:<encoding>; the flag may "
        "be repeated",
    )
    add(
        "--sample_bytes",
        metavar="BYTES",
        help=(f"size of the text sample (default: {SAMPLE_BYTES})"),
    )
    add("--output", type=Path, metavar="FILE", help="also write the results as JSON")


def run(options: argparse.Namespace) -> None:
    from data_prep.files.inputs import total_bytes
    from data_prep.read.bad_input import Tally, summary_lines
    from data_prep.tasks.progress import Progress
    from data_prep.tokenizer import load, text_sample
    from data_prep.tokenizer.report import comparison_rows, format_table
    from zerolm.common.files import write_json

    problems = Problems()
    sample_bytes = problems.size("sample_bytes", options.sample_bytes, 1, default=SAMPLE_BYTES)
    if options.output is not None and options.output.suffix != ".json":
        problems.lines.append(f"--output {options.output}: must end in .json. Rename it.")
    problems.file_to_write("output", options.output)
    if len(set(options.tokenizer)) < len(options.tokenizer):
        problems.lines.append("--tokenizer: the same tokenizer is given twice. Give each once.")
    rules = input_rules(options, problems)
    inputs, notes = find_inputs(options, rules, problems)
    loaded = [problems.collect(load.load_tokenizer, name) for name in options.tokenizer]
    problems.refuse()
    print_notes([*notes, *(line for each in loaded for line in each.notices)])
    progress = Progress("compare-tokenizers", total_bytes(inputs))
    tally = Tally()
    sample = text_sample.Sample(sample_bytes, text_sample.source_names(inputs))
    for source, text in text_sample.read_texts(inputs, rules, tally, progress.add):
        sample.add(source, text)
    progress.close()
    for line in summary_lines(inputs, tally, rules):
        print(line)
    texts = sample.by_source()
    reports = {each.name: _measure(each, texts) for each in loaded}
    print(format_table(comparison_rows(reports)))
    if options.output is not None:
        write_json(options.output, reports)


def _measure(tokenizer: Any, texts: dict[str, list[str]]) -> dict[str, Any]:
    """Encode each source's texts with one tokenizer, and return its report and encoding speed."""
    from data_prep.tokenizer.encoder_choice import choose_backend
    from data_prep.tokenizer.encoders import load_encoder
    from data_prep.tokenizer.train import measure_copy

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
        report = measure_copy(directory, encoder, tokenizer.vocab_size, texts)
    report["encoder"] = choice.backend
    report["megabytes_per_second"] = round(num_bytes / 1e6 / max(seconds, 1e-9), 2)
    return report
