"""`train-tokenizer`: train a byte-level BPE tokenizer, and print the report on it."""

import argparse
import json
import signal

from data_prep.cli.input_flags import (
    add_input_flags,
    add_output_flag,
    find_inputs,
    input_rules,
    print_notes,
)
from data_prep.cli.problems import Problems
from data_prep.pipeline.recipe_options import TokenizerOptions
from data_prep.stages.options import add_option_flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser)
    add_option_flags(parser, TokenizerOptions)
    parser.add_argument(
        "--text_field_of",
        metavar="INPUT=FIELD",
        action="append",
        default=[],
        help=(
            "the text field of one --input, if it differs from --text_field; the flag may be "
            "repeated"
        ),
    )
    add_output_flag(parser, "DIR", "a new directory for the tokenizer")
    parser.add_argument(
        "--sample_bytes",
        metavar="BYTES",
        help="amount of text to train on, sampled by a hash from each --input in proportion to its "
        "size (default: all text)",
    )


def run(options: argparse.Namespace) -> None:
    from data_prep.read.bad_input import summary_lines
    from data_prep.stages.output_rules import overlap_problems
    from data_prep.tokenizer.report import report_lines
    from data_prep.tokenizer.train import REPORT_FILE, train_on_inputs

    # Python's handlers would run only after the Rust trainer returns. Exiting at once is safe:
    # nothing is written before the end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    problems = Problems()
    recipe = problems.options(TokenizerOptions, options).bpe()
    problems.lines += recipe.problems() if not problems.lines else []
    sample_bytes = problems.size("sample_bytes", options.sample_bytes, 1)
    rules = input_rules(options, problems)
    inputs, notes = find_inputs(options, rules, problems, _text_fields(options, problems))
    problems.shard_output(options.output)
    problems.lines += overlap_problems(options.output, options.input, inputs)
    problems.refuse()
    print_notes(notes)
    trained = train_on_inputs(inputs, rules, recipe, sample_bytes or 0, options.output)
    print(f"tokenizer   {options.output}: {trained.vocab_size:,} ids")
    size = f"{trained.num_bytes / 1e6:,.1f} MB of text"
    print(f"trained on  {trained.num_documents:,} documents, {size}")
    if sample_bytes:
        read = f"{trained.read_bytes / 1e6:,.1f} MB"
        print(f"sampled     from {trained.read_documents:,} documents, {read}")
    print(f"seconds     {trained.seconds:,.1f}")
    for line in summary_lines(inputs, trained.tally, rules):
        print(line)
    for line in report_lines(json.loads((options.output / REPORT_FILE).read_bytes())):
        print(line)
    if trained.vocab_size < recipe.vocab_size:
        print(
            f"note        --vocab_size {recipe.vocab_size:,} was not reached, since the text has "
            f"no more pairs to merge. Set vocab_size {trained.vocab_size:,} in the model's config."
        )


def _text_fields(options: argparse.Namespace, problems: Problems) -> dict[str, str]:
    """Parse --text_field_of; return a mapping from values of --input to their text fields."""
    fields = {}
    for given in options.text_field_of:
        name, _, field = given.rpartition("=")
        if name not in options.input or not field:
            problems.lines.append(
                f"--text_field_of {given}: is not INPUT=FIELD with a value of --input: "
                f"{', '.join(options.input)}."
            )
        fields[name] = field
    return fields
