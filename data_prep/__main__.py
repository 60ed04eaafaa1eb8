"""Prepare data: `python -m data_prep train-tokenizer | tokenize | verify | inspect`."""

import argparse
import importlib.metadata
import math
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.command_line import Problems, parse
from data_prep.commands_pack import pack_shards
from zerolm.errors import EXIT_DONE, ConfigError, ZerolmError

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
MIN_VOCAB_SIZE = 257  # every byte, and the EOS token
MAX_VOCAB_SIZE = 1 << 32
SUMMARY_NAMES = {
    "empty": "empty documents",
    "null": "documents whose text is null",
    "blank_lines": "blank lines",
    "no_tokens": "documents without a single token",
}


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


def tokenize(options: argparse.Namespace) -> None:
    from data_prep import sources, tokenizers
    from data_prep.documents import InputRules
    from data_prep.progress import Progress
    from data_prep.tokenize import BATCH_BYTES, BatchEncoder
    from data_prep.tokenize import tokenize as run
    from data_prep.units import plan_units, read_unit
    from zerolm.shards import DEFAULT_SHARD_TOKENS, TOKENIZER_DIRECTORY, ShardWriter

    problems = Problems()
    workers = problems.number(
        "workers", options.workers, 1, 4096, default=len(os.sched_getaffinity(0))
    )
    shard_tokens = problems.number(
        "shard_tokens", options.shard_tokens, 1, default=DEFAULT_SHARD_TOKENS
    )
    outputs, fraction = _check_outputs(options, problems)
    found = problems.of(sources.find_inputs, options.input, options.text_field)
    tokenizer = problems.of(tokenizers.load_tokenizer, options.tokenizer)
    problems.refuse()
    inputs = _show_notes(*found)
    rules = InputRules(options.text_field)
    writers: list[ShardWriter] = []
    progress = Progress("tokenize", _total_bytes(inputs))
    try:
        for output in outputs:
            writer = ShardWriter(
                output,
                vocab_size=tokenizer.vocab_size,
                eos_id=tokenizer.eos_id,
                tokenizer={"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
                shard_tokens=shard_tokens,
            )
            writers.append(writer)
            writer.tokenizer = tokenizer.write_copy(output / TOKENIZER_DIRECTORY)
        encoder = BatchEncoder(
            partial(tokenizers.load_encoder, outputs[0] / TOKENIZER_DIRECTORY),
            tokenizer.eos_id,
            tokenizer.vocab_size,
            inputs,
            rules,
            fraction,
        )
        summary = run(
            (
                chunk
                for unit in plan_units(inputs)
                for chunk in read_unit(inputs, unit, rules, BATCH_BYTES)
            ),
            writers,
            encoder,
            num_workers=workers,
            progress=progress,
            provenance=_provenance(inputs, options.text_field),
        )
    finally:
        progress.close()
        for writer in writers:
            writer.abort()
    _show_summary(outputs, summary, workers)


def _check_outputs(
    options: argparse.Namespace, problems: Problems
) -> tuple[list[Path], float | None]:
    from zerolm.shards import output_problems

    fraction = None
    if options.val_fraction is not None:
        try:
            fraction = float(options.val_fraction)
        except ValueError:
            fraction = math.nan
        if not 0 < fraction < 1:
            problems.lines.append(
                f"--val_fraction {options.val_fraction}: is not a number between 0 and 1."
            )
    if (options.val_fraction is None) != (options.val_output is None):
        given, other = "--val_fraction", "--val_output"
        if options.val_fraction is None:
            given, other = other, given
        problems.lines.append(f"{given}: needs {other} too. Give both, or neither.")
    outputs = [options.output]
    problems.lines += [f"--output {line}" for line in output_problems(options.output)]
    if options.val_output is not None:
        outputs.append(options.val_output)
        problems.lines += [f"--val_output {line}" for line in output_problems(options.val_output)]
        one, two = options.output.resolve(), options.val_output.resolve()
        if one == two or one in two.parents or two in one.parents:
            problems.lines.append(
                f"--val_output {options.val_output}: is --output, or one is inside the other. "
                f"Each needs a directory of its own."
            )
    return outputs, fraction


def _show_notes(inputs: list, notes: list[str]) -> list:
    for note in notes:
        print(note, file=sys.stderr)
    return inputs


def _total_bytes(inputs: Sequence[Any]) -> int | None:
    sizes = [each.size_bytes for each in inputs]
    return None if None in sizes else sum(sizes)


def _provenance(inputs: Sequence[Any], text_field: str) -> dict[str, Any]:
    entries: dict[str, dict[str, Any]] = {}
    for each in inputs:
        empty = {"input": each.argument, "num_files": 0, "size_bytes": 0}
        entry = entries.setdefault(each.argument, empty)
        if each.size_bytes is None:  # a hub data set
            entry["num_files"] = entry["size_bytes"] = None
        else:
            entry["num_files"] += 1
            entry["size_bytes"] += each.size_bytes
    return {
        "inputs": list(entries.values()),
        "text_field": text_field,
        "zerolm_version": _version(),
    }


def _version() -> str | None:
    try:
        return importlib.metadata.version("zerolm")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return None


def _show_summary(outputs: Sequence[Path], summary: Any, workers: int) -> None:
    for output, manifest, size in zip(outputs, summary.manifests, summary.text_bytes, strict=True):
        documents, tokens = manifest["num_documents"], manifest["num_tokens"]
        print(
            f"{output}: {documents:,} documents, {tokens:,} tokens "
            f"({manifest['dtype']}, vocabulary {manifest['vocab_size']:,}), "
            f"{len(manifest['shards'])} shards"
        )
        print(f"    tokens per document  {tokens / documents:,.1f}")
        print(f"    bytes per token      {size / tokens:.3f}  (EOS included)")
    for reason, count in sorted(summary.skipped.items()):
        print(f"skipped: {count:,} {SUMMARY_NAMES[reason]}")
    if summary.num_inner_eos:
        print(
            f"note: {summary.num_inner_eos:,} EOS ids are inside documents: this tokenizer gives "
            f"its EOS id for text, as its unknown token or since EOS is not marked as special"
        )
    rate = sum(summary.text_bytes) / 1e6 / summary.seconds
    print(f"seconds: {summary.seconds:,.1f} with {workers} workers, {rate:,.2f} MB/s of text")


def verify(options: argparse.Namespace) -> None:
    from zerolm import shards

    problems = Problems()
    for directory in options.shards:
        manifest = problems.of(shards.verify, directory)
        if manifest is not None:
            print(
                f"{directory}: whole. {manifest['num_documents']:,} documents, "
                f"{manifest['num_tokens']:,} tokens, {len(manifest['shards'])} shards"
            )
    problems.refuse()


def inspect(options: argparse.Namespace) -> None:
    from data_prep.inspect import find_window
    from zerolm.excerpts import load_decoder, read_window, render
    from zerolm.shards import TOKENIZER_DIRECTORY, open_source

    problems = Problems()
    sequence = problems.number("sequence", options.sequence, 0, (1 << 62) - 1)
    seq_len = problems.number("seq_len", options.seq_len, 1, (1 << 62) - 1)
    seed = problems.number("seed", options.seed, -(1 << 63), (1 << 63) - 1)
    source = problems.of(open_source, options.shards)
    copy = options.shards / TOKENIZER_DIRECTORY
    if source is not None and not copy.is_dir():
        problems.lines.append(f"{copy}: no such directory, so ids cannot be shown as text.")
    problems.refuse()
    window, epoch = find_window(source, sequence, seq_len, None if options.seed is None else seed)
    parts = read_window(source, window, seq_len)
    start = window * seq_len
    origin = f"sequence {sequence} of seed {seed}, epoch {epoch}: " if options.seed else ""
    print(
        f"{options.shards}: {origin}window {window}, tokens {start:,} to {start + seq_len + 1:,}, "
        f"documents {parts[0].document} to {parts[-1].document} of {source.num_documents:,}"
    )
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for line in render(parts, load_decoder(copy)):
        print(line)


COMMANDS = {
    "train-tokenizer": train_tokenizer,
    "tokenize": tokenize,
    "verify": verify,
    "inspect": inspect,
    "pack": pack_shards,
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
