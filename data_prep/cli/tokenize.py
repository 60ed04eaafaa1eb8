"""`tokenize`: encode documents into token shards."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.cli.input_flags import (
    add_input_flags,
    add_output_flag,
    add_workers_flag,
    find_inputs,
    input_rules,
    print_notes,
    provenance,
)
from data_prep.cli.problems import Problems
from data_prep.pipeline.recipe_options import ShardOptions
from data_prep.stages.options import add_option_flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser)
    add = parser.add_argument
    add(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="a Hugging Face tokenizer directory or hub id, or tiktoken:<encoding>",
    )
    add_output_flag(parser, "SHARDS", "a new directory for the token shards")
    add_workers_flag(parser)
    add(
        "--val_fraction",
        metavar="F",
        help="fraction of the documents to hold out, chosen by a hash of the text",
    )
    add(
        "--val_output",
        type=Path,
        metavar="SHARDS",
        help="a new directory for the held-out documents",
    )
    add_option_flags(parser, ShardOptions)


def run(options: argparse.Namespace) -> None:
    from data_prep.encode.options import TokenizeOptions
    from data_prep.encode.run import run_tokenization
    from data_prep.stages.output_rules import overlap_problems
    from data_prep.tasks.phases import LocalExecutor
    from data_prep.tokenizer import load

    problems = Problems()
    workers = problems.workers(options.workers)
    shards = problems.options(ShardOptions, options)
    fraction = problems.fraction("val_fraction", options.val_fraction, 0.5, exclusive=True)
    outputs = _check_outputs(options, problems)
    rules = input_rules(options, problems)
    inputs, notes = find_inputs(options, rules, problems)
    for flag, output in zip(("--output", "--val_output"), outputs, strict=False):
        problems.lines += overlap_problems(output, options.input, inputs, flag)
    tokenizer = problems.collect(load.load_tokenizer, options.tokenizer)
    if shards is not None and shards.bos and tokenizer is not None:
        problems.collect(load.require_bos, tokenizer)
    problems.refuse()
    print_notes([*notes, *tokenizer.notices])
    summary = run_tokenization(
        inputs,
        tokenizer,
        outputs,
        TokenizeOptions(
            rules=rules,
            encoder=shards.encoder,
            val_fraction=None if options.val_fraction is None else fraction,
            bos=shards.bos,
            shard_tokens=shards.shard_tokens,
            max_unknown=shards.max_unknown,
        ),
        LocalExecutor(workers),
        provenance(),
    )
    print_summary(outputs, summary, workers)


def _check_outputs(options: argparse.Namespace, problems: Problems) -> list[Path]:
    """Check the output directories, including that they do not overlap, and return them."""
    if (options.val_fraction is None) != (options.val_output is None):
        given, other = "--val_fraction", "--val_output"
        if options.val_fraction is None:
            given, other = other, given
        problems.lines.append(f"{given}: needs {other} too. Give both, or neither.")
    outputs = [options.output]
    problems.shard_output(options.output)
    if options.val_output is not None:
        outputs.append(options.val_output)
        problems.shard_output(options.val_output, "val_output")
        one, two = options.output.resolve(), options.val_output.resolve()
        if one == two or one in two.parents or two in one.parents:
            problems.lines.append(
                f"--val_output {options.val_output}: must not equal, contain or be inside "
                "--output. Give them separate directories."
            )
    return outputs


def print_summary(outputs: Sequence[Path], summary: Any, workers: int) -> None:
    """Print what was written, what was skipped, and the processing speed."""
    from data_prep.tokenizer.backends import load_tokenizer_json
    from zerolm.shards import boundaries
    from zerolm.shards.reader import open_source

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
    source = open_source(outputs[0])
    known = boundaries.read_boundaries(source.tokenizer_directory(), load_tokenizer_json)
    print(f"between documents: {boundaries.described(source, known)}")
    for line in boundaries.notices(source, known):
        print(f"note: {line}")
    for line in summary.input_lines:
        print(line)
    if no_tokens := first["skipped_documents"].get("no_tokens"):
        print(f"skipped: {no_tokens:,} documents without tokens")
    if first["inner_eos_ids"]:
        print(
            f"note: {first['inner_eos_ids']:,} EOS ids are inside documents: this tokenizer "
            "encodes some text as its EOS id, because EOS is its unknown token or is not marked "
            "as special"
        )
    if first["unknown_ids"]:
        total = sum(manifest["num_tokens"] for manifest in summary.manifests)
        print(
            f"note: {first['unknown_ids']:,} tokens ({first['unknown_ids'] / total:.2%}) are the "
            "tokenizer's unknown token, so their text is lost"
        )
    print(f"encoder: {_encoder_summary(first['encoder'])}")
    if summary.note is not None:
        print(f"    {summary.note}")
    rate = sum(manifest["text_bytes"] for manifest in summary.manifests) / 1e6 / summary.seconds
    print(f"seconds: {summary.seconds:,.1f} with {workers} workers, {rate:,.2f} MB/s of text")


def _encoder_summary(encoder: dict[str, Any]) -> str:
    parts = []
    for key, count in encoder["counts"].items():
        name, _, unit = key.rpartition(".")
        if unit == "documents" and name not in ("checked", "failed"):
            size = encoder["counts"].get(f"{name}.bytes", 0)
            version = f" {encoder['version']}" if name == encoder["backend"] else ""
            parts.append(f"{name}{version}, {count:,} documents, {size / 1e6:,.1f} MB")
    if failed := encoder["counts"].get("failed.documents"):
        parts.append(f"{failed:,} of them because {encoder['backend']} failed")
    if checked := encoder["counts"].get("checked.documents"):
        parts.append(f"{checked:,} checked against {encoder['reference']}")
    return "; ".join(parts)
