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

MIN_VOCAB_SIZE = 257  # every byte, and the EOS token
MAX_VOCAB_SIZE = 1 << 32


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser)
    add = parser.add_argument
    add(
        "--vocab_size",
        required=True,
        metavar="N",
        help="total number of token ids: special tokens, bytes and merges",
    )
    add_output_flag(parser, "DIR", "a new directory for the tokenizer")
    add(
        "--sample_bytes",
        metavar="BYTES",
        help="train on this much text, sampled by a hash from each --input in proportion to its "
        "size (default: all of it)",
    )
    add(
        "--split",
        default="gpt2",
        help="pattern that splits text into pieces, which merges never cross: gpt2 (default), "
        "llama3 or o200k",
    )
    add("--digits", help="digits in one piece: 1, 3 or any (default: that of --split)")
    add(
        "--whitespace",
        default="runs",
        help="runs: a run of spaces may become one token (default); single: each whitespace "
        "character is a piece",
    )
    add(
        "--special_tokens",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="special tokens besides the EOS token; their ids are 1, 2, ...",
    )
    add("--min_frequency", metavar="N", help="merge only pairs that occur this often (default: 0)")


def run(options: argparse.Namespace) -> None:
    from data_prep.read.bad_input import summary_lines
    from data_prep.stages.output_rules import overlap_problems
    from data_prep.tokenizer.bpe import BpeOptions
    from data_prep.tokenizer.report import report_lines
    from data_prep.tokenizer.train import REPORT_FILE, train_on_inputs
    from zerolm.shards.directory import output_problems

    # Python's handlers would run only after the Rust trainer returns. Exiting at once is safe:
    # nothing is written before the end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    problems = Problems()
    recipe = BpeOptions(
        problems.number("vocab_size", options.vocab_size, MIN_VOCAB_SIZE, MAX_VOCAB_SIZE),
        options.split,
        options.digits,
        options.whitespace,
        tuple(options.special_tokens),
        problems.number("min_frequency", options.min_frequency, 0),
    )
    sample_bytes = problems.size("sample_bytes", options.sample_bytes, 1)
    if not any(line.startswith("--vocab_size") for line in problems.lines):
        problems.lines += recipe.problems()
    rules = input_rules(options, problems)
    found = find_inputs(options, rules, problems)
    problems.lines += [f"--output {line}" for line in output_problems(options.output)]
    problems.lines += overlap_problems(options.output, options.input, found[0] if found else ())
    problems.refuse()
    inputs, notes = found
    print_notes(notes)
    trained = train_on_inputs([(inputs, rules)], recipe, sample_bytes or 0, options.output)
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
            f"note        --vocab_size {recipe.vocab_size:,} was not reached: the text has no more "
            f"pairs to merge. Set vocab_size {trained.vocab_size:,} in the model's config."
        )
