"""`split`: split the documents of token shards, such as into training and validation."""

import argparse
import re

from data_prep.cli.input_flags import add_output_flag, provenance
from data_prep.cli.problems import Problems
from zerolm.common.url import path_or_url

PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("shards", type=path_or_url, metavar="SHARDS", help="a shard directory or URL")
    add_output_flag(parser, "DIR", "a directory for the parts, each written to DIR/NAME")
    add(
        "--parts",
        required=True,
        metavar="NAME=F,...",
        help=(
            "names and fractions of the parts, such as train=0.99,val=0.01; a hash of its token "
            "ids assigns each document to a part"
        ),
    )
    add("--shard_tokens", metavar="N", help="maximum tokens per shard (default: 134217728)")


def run(options: argparse.Namespace) -> None:
    from data_prep.finished_shards.output import space_problems
    from data_prep.finished_shards.split import split
    from zerolm.shards import reader
    from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

    problems = Problems()
    source = problems.collect(reader.open_source, options.shards)
    parts = _parts(problems, options.parts)
    size = problems.number("shard_tokens", options.shard_tokens, 1, default=DEFAULT_SHARD_TOKENS)
    directories = {options.output / name: share for name, share in parts.items()}
    for directory in directories:
        problems.shard_output(directory)
    problems.outside_of_inputs(options.output, [options.shards])
    if source is not None:
        num_bytes = source.num_tokens * source.dtype.itemsize + 24 * source.num_documents
        problems.lines += space_problems(options.output, num_bytes)
        if not source.has_checksums and not problems.lines:  # of an older release
            problems.collect(reader.verify, source.directory)
    problems.refuse()
    manifests = split(source, directories, size, provenance())
    print(f"read: {source.num_documents:,} documents, {source.num_tokens:,} tokens")
    for path, manifest in zip(directories, manifests, strict=True):
        print(
            f"{path}: {manifest['num_documents']:,} documents, {manifest['num_tokens']:,} tokens, "
            f"{len(manifest['shards'])} shards"
        )


def _parts(problems: Problems, text: str) -> dict[str, float]:
    """Parse --parts."""
    parts: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        if not PART_NAME.fullmatch(name) or name in parts:
            problems.lines.append(
                f"--parts {text}: {name!r} is not a new directory name. Write NAME=F,NAME=F."
            )
            return {}
        parts[name] = problems.fraction("parts", share, 0.5, exclusive=True)
    if abs(sum(parts.values()) - 1) > 1e-9:
        problems.lines.append(f"--parts {text}: the fractions do not add up to 1. Correct them.")
    return parts
