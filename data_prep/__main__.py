"""Prepare data: `python -m data_prep train-tokenizer | tokenize | verify | inspect | stats`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from data_prep import commands_look
from data_prep.command_line import Problems, parse
from data_prep.commands_clean import clean, progress
from data_prep.commands_dedup import decontaminate, dedup
from data_prep.commands_pack import pack_shards
from data_prep.commands_run import run
from data_prep.commands_tokenize import tokenize, verify
from zerolm.errors import EXIT_DONE, ConfigError, ZerolmError

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
MIN_VOCAB_SIZE = 257  # every byte, and the EOS token
MAX_VOCAB_SIZE = 1 << 32


def train_tokenizer(options: argparse.Namespace) -> None:
    from data_prep import sources, tokenizers
    from data_prep.bad_input import Tally, check_bad_fraction, summary_lines
    from data_prep.input_flags import input_rules
    from data_prep.progress import Progress
    from data_prep.units import plan_units, read_batches
    from zerolm.shards import output_problems

    for number in (signal.SIGINT, signal.SIGTERM):  # while Rust computes, Python hears nothing;
        signal.signal(number, signal.SIG_DFL)  # nothing is written before the end
    problems = Problems()
    vocab_size = problems.number("vocab_size", options.vocab_size, MIN_VOCAB_SIZE, MAX_VOCAB_SIZE)
    rules = input_rules(options, problems)
    skip = rules.on_bad_input == "skip"
    found = problems.of(sources.find_inputs, options.input, options.text_field, skip)
    problems.lines += [f"--output {line}" for line in output_problems(options.output)]
    problems.refuse()
    inputs = _show_notes(*found)
    progress = Progress("train-tokenizer", _total_bytes(inputs))
    tally = Tally()
    num_bytes = 0

    def texts():
        nonlocal num_bytes
        for unit in plan_units(inputs):
            for batch in read_batches(inputs, unit, rules, tally):
                num_bytes += sum(len(document.utf8) for document in batch.documents)
                progress.add(batch.input_bytes, len(batch.documents))
                yield from (document.text for document in batch.documents)
        progress.close()
        check_bad_fraction(inputs, tally, rules)
        if not progress.num_documents:
            raise ConfigError("--input: no documents to train on.")

    reached = tokenizers.train_tokenizer(texts(), vocab_size, options.output, sys.stderr.isatty())
    print(f"tokenizer   {options.output}: {reached:,} ids")
    print(f"trained on  {progress.num_documents:,} documents, {num_bytes / 1e6:,.1f} MB of text")
    print(f"seconds     {progress.seconds:,.1f}")
    for line in summary_lines(inputs, tally, rules):
        print(line)
    if reached < vocab_size:
        print(
            f"note        --vocab_size {vocab_size:,} was not reached: the text has no more pairs "
            f"to merge. Set vocab_size {reached:,} in the model's config."
        )


def _show_notes(inputs: list, notes: list[str]) -> list:
    for note in notes:
        print(note, file=sys.stderr)
    return inputs


def _total_bytes(inputs: Sequence[Any]) -> int | None:
    sizes = [each.size_bytes for each in inputs]
    return None if None in sizes else sum(sizes)


COMMANDS = {
    "train-tokenizer": train_tokenizer,
    "tokenize": tokenize,
    "verify": verify,
    "inspect": commands_look.inspect,
    "stats": commands_look.stats,
    "pack": pack_shards,
    "dedup": dedup,
    "decontaminate": decontaminate,
    "run": run,
    "progress": progress,
    "clean": clean,
}


def _terminate(*_: object) -> None:
    sys.exit(EXIT_TERMINATED)  # an exception, so that workers are stopped and files removed


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _terminate)
    try:
        options = parse(argv)
        COMMANDS[options.command](options)
    except ZerolmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted; nothing was published.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
