"""`python -m data_prep tokenize` and `verify`: from the command line to shards."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.command_line import Problems


def tokenize(options: argparse.Namespace) -> None:
    """Run the command; data_prep/tokenization.py does the work."""
    from data_prep import sources, tokenizers
    from data_prep.input_flags import input_rules
    from data_prep.phases import LocalExecutor
    from data_prep.tokenization import TokenizeOptions, run_tokenization
    from zerolm.shard_writer import DEFAULT_SHARD_TOKENS

    problems = Problems()
    workers = problems.number(
        "workers", options.workers, 1, 4096, default=len(os.sched_getaffinity(0))
    )
    shard_tokens = problems.number(
        "shard_tokens", options.shard_tokens, 1, default=DEFAULT_SHARD_TOKENS
    )
    outputs, fraction = _check_outputs(options, problems)
    rules = input_rules(options, problems)
    skip = rules.on_bad_input == "skip"
    found = problems.of(sources.find_inputs, options.input, options.text_field, skip)
    tokenizer = problems.of(tokenizers.load_tokenizer, options.tokenizer)
    problems.refuse()
    inputs, notes = found
    for note in notes:
        print(note, file=sys.stderr)
    summary = run_tokenization(
        inputs,
        tokenizer,
        outputs,
        TokenizeOptions(
            rules=rules,
            encoder=options.encoder,
            val_fraction=fraction,
            shard_tokens=shard_tokens,
        ),
        LocalExecutor(workers),
        {"command": ["python", "-m", "data_prep", *sys.argv[1:]], "zerolm_version": _version()},
    )
    show_summary(outputs, summary, workers)


def _check_outputs(
    options: argparse.Namespace, problems: Problems
) -> tuple[list[Path], float | None]:
    from zerolm.shard_directory import output_problems

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


def _version() -> str | None:
    import importlib.metadata  # which imports the whole of `email`: not in every worker

    try:
        return importlib.metadata.version("zerolm")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return None


def show_summary(outputs: Sequence[Path], summary: Any, workers: int) -> None:
    """Print what was written, what was left out, and how fast it went."""
    for output, manifest in zip(outputs, summary.manifests, strict=True):
        documents, tokens = manifest["num_documents"], manifest["num_tokens"]
        print(
            f"{output}: {documents:,} documents, {tokens:,} tokens "
            f"({manifest['dtype']}, vocabulary {manifest['vocab_size']:,}), "
            f"{len(manifest['shards'])} shards"
        )
        print(f"    tokens per document  {tokens / documents:,.1f}")
        print(f"    bytes per token      {manifest['text_bytes'] / tokens:.3f}  (EOS included)")
    first = summary.manifests[0]
    for line in summary.input_lines:
        print(line)
    if no_tokens := first["skipped_documents"].get("no_tokens"):
        print(f"skipped: {no_tokens:,} documents without a single token")
    if first["inner_eos_ids"]:
        print(
            f"note: {first['inner_eos_ids']:,} EOS ids are inside documents: this tokenizer gives "
            f"its EOS id for text, as its unknown token or since EOS is not marked as special"
        )
    print(f"encoder: {_encoder_words(first['encoder'])}")
    for note in summary.notes:
        print(f"    {note}")
    rate = sum(manifest["text_bytes"] for manifest in summary.manifests) / 1e6 / summary.seconds
    print(f"seconds: {summary.seconds:,.1f} with {workers} workers, {rate:,.2f} MB/s of text")


def _encoder_words(encoder: dict[str, Any]) -> str:
    words = []
    for key, count in encoder["counts"].items():
        name, _, what = key.rpartition(".")
        if what == "documents" and name not in ("checked", "failed"):
            size = encoder["counts"].get(f"{name}.bytes", 0)
            version = f" {encoder['version']}" if name == encoder["backend"] else ""
            words.append(f"{name}{version}, {count:,} documents, {size / 1e6:,.1f} MB")
    if failed := encoder["counts"].get("failed.documents"):
        words.append(f"{failed:,} of them since {encoder['backend']} failed")
    if checked := encoder["counts"].get("checked.documents"):
        words.append(f"{checked:,} checked against {encoder['reference']}")
    return "; ".join(words)


def verify(options: argparse.Namespace) -> None:
    """Compare every file of shards, and of the packings beside them, with its checksum."""
    from zerolm import packing, shards

    problems = Problems()
    for directory in options.shards:
        manifest = problems.of(shards.verify, directory)
        damaged = packing.verify_packings(shards.open_source(directory)) if manifest else []
        problems.lines += damaged
        if manifest is not None and not damaged:
            print(
                f"{directory}: whole. {manifest['num_documents']:,} documents, "
                f"{manifest['num_tokens']:,} tokens, {len(manifest['shards'])} shards"
            )
    problems.refuse()
