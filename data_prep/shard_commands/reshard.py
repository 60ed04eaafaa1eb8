"""`reshard`: merge, split, shuffle, subset or reshard token shards."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.cli.input_flags import add_output_flag, provenance
from data_prep.cli.problems import Problems
from zerolm.common.url import is_url, path_or_url

LIMIT = (1 << 62) - 1
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "shards",
        nargs="+",
        type=path_or_url,
        metavar="SHARDS",
        help="shard directories or URLs; the documents of several are merged in this order",
    )
    add_output_flag(parser, "SHARDS", "a new directory for the token shards")
    add(
        "--shard_tokens",
        metavar="N",
        help="maximum tokens of a shard (default: 134217728, or 256 to 512 MiB)",
    )
    add("--shuffle", metavar="SEED", help="shuffle the documents (default: keep their order)")
    add(
        "--split",
        metavar="NAME=F,...",
        help="divide the documents by a hash of their ids: train=0.99,val=0.01 writes "
        "OUTPUT/train and OUTPUT/val",
    )
    add("--max_tokens", metavar="N", help="stop before the document that exceeds N tokens")
    add("--max_documents", metavar="N", help="stop after N documents")
    add("--min_length", metavar="N", help="drop documents of fewer tokens, counting their EOS")
    add("--max_length", metavar="N", help="drop documents of more tokens, counting their EOS")
    add("--files", metavar="GLOB", help="keep documents that were read from such input files")
    add("--keep", type=Path, metavar="FILE", help="keep the documents with these numbers, a line "
        "each, counted from 0 over all SHARDS")  # fmt: skip
    add("--drop", type=Path, metavar="FILE", help="drop the documents with these numbers")


def run(options: argparse.Namespace) -> None:
    from data_prep.shards.documents import Selection
    from data_prep.shards.reshard import Options, Reshard, differences
    from zerolm.shards import reader
    from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

    problems = Problems()
    sources = [problems.collect(reader.open_source, path) for path in options.shards]
    opened = [source for source in sources if source is not None]
    if opened:
        problems.lines += differences(opened)
    if len(set(map(str, options.shards))) < len(options.shards):
        problems.lines.append("SHARDS: a directory is given twice. Name each of them once.")
    total = sum(source.num_documents for source in opened)
    limits = {
        name: _optional(problems, name, getattr(options, name))
        for name in ("max_tokens", "max_documents", "min_length", "max_length")
    }
    low, high = limits["min_length"], limits["max_length"]
    if low is not None and high is not None and low > high:
        problems.lines.append(
            f"--min_length {low}: above --max_length {high}, so no document has such a length. "
            f"Correct one of them."
        )
    lists = {
        name: _numbers(problems, name, getattr(options, name), total) for name in ("keep", "drop")
    }
    chosen = Options(
        Selection(options.files, keep=lists["keep"], drop=lists["drop"], **limits),
        None
        if options.shuffle is None
        else problems.number("shuffle", options.shuffle, -(1 << 63), (1 << 63) - 1),
        _parts(problems, options.split),
        problems.number("shard_tokens", options.shard_tokens, 1, default=DEFAULT_SHARD_TOKENS),
    )
    for output in chosen.outputs(options.output):
        problems.shard_output(output)
    problems.lines += inside_problems(options.output, options.shards)
    for source in opened:  # older shards have no checksums of blocks, so they are verified first
        if not source.has_checksums and not problems.lines:
            problems.collect(reader.verify, source.directory)
    plan = None if problems.lines else problems.collect(Reshard, opened, options.output, chosen)
    if plan is not None:
        problems.lines += plan.space_problems()
    problems.refuse()
    assert plan is not None
    manifests = plan.run(provenance())
    before = sum(source.num_tokens for source in opened)
    print(f"read: {total:,} documents, {before:,} tokens of {len(opened)} shard directories")
    for path, manifest in zip(chosen.outputs(options.output), manifests, strict=True):
        print(
            f"{path}: {manifest['num_documents']:,} documents, {manifest['num_tokens']:,} tokens, "
            f"{len(manifest['shards'])} shards"
        )
    packed = sorted(
        {index.name for source in opened if not source.is_remote
         for index in source.directory.glob("packing-*.json")}
    )  # fmt: skip
    for name in packed:
        seq_len = name.removeprefix("packing-").removesuffix(".json")
        print(f"note: {name} is not copied; run: zerolm data pack SHARDS --seq_len {seq_len}")


def inside_problems(output: Path, inputs: Sequence[Any]) -> list[str]:
    """Return why an output cannot be written: it is an input, or inside of one."""
    target = output.resolve()
    return [
        f"--output {output}: is {path}, which is read, or inside of it. Choose another directory."
        for path in inputs
        if not is_url(str(path)) and path.resolve() in (target, *target.parents)
    ]


def _optional(problems: Problems, name: str, text: str | None) -> int | None:
    return None if text is None else problems.number(name, text, 1, LIMIT)


def _numbers(problems: Problems, name: str, path: Path | None, total: int) -> Any:
    """Read a file of document numbers; return them ascending, or None without a file."""
    import numpy as np

    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problems.lines.append(f"--{name} {path}: cannot be read ({error}). Check the path.")
        return None
    found = set()
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()):
            continue
        if not (text.isascii() and text.isdigit() and int(text) < total):
            problems.lines.append(
                f"--{name} {path}: line {number}: {text[:40]!r} is not the number of one of "
                f"{total:,} documents, counted from 0. Correct the line."
            )
            return None
        found.add(int(text))
    return np.array(sorted(found), np.int64)


def _parts(problems: Problems, text: str | None) -> dict[str, float] | None:
    """Parse --split."""
    if text is None:
        return None
    parts: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        if not PART_NAME.fullmatch(name) or name in parts:
            problems.lines.append(
                f"--split {text}: {name!r} is not a new directory name. Write NAME=F,NAME=F."
            )
            return None
        parts[name] = problems.fraction("split", share, 0.5, exclusive=True)
    if abs(sum(parts.values()) - 1) > 1e-9:
        problems.lines.append(f"--split {text}: the parts do not add up to 1. Correct them.")
    return parts
