"""`convert`: make token shards from other formats, or write them for Megatron and nanoGPT."""

import argparse
import json
from pathlib import Path
from typing import Any

from data_prep.cli.input_flags import add_output_flag, print_notes, provenance
from data_prep.cli.problems import Problems
from zerolm.common.url import is_url, path_or_url

NAMES = ("megatron", "mds", "litdata", "parquet", "nanogpt")
WRITTEN = ("megatron", "nanogpt")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("inputs", nargs="+", type=path_or_url, metavar="INPUT", help="with --from: files, prefixes "
        "or directories of that format; with --to: shard directories or URLs")  # fmt: skip
    add("--from", dest="source", choices=NAMES, help="read this format, and write token shards")
    add("--to", dest="target", choices=WRITTEN, help="read token shards, and write this format")
    add_output_flag(parser, "DIR", "a new directory")
    add("--tokenizer", metavar="DIR", help="with --from: the tokenizer that made the ids")
    add(
        "--boundaries",
        choices=("items", "eos"),
        help="with --from: a document is an item of the format, or ends at an EOS id (default: "
        "items; nanogpt has none)",
    )
    add("--append_eos", action="store_true", help="with --from: add the EOS id to documents that "
        "do not end in it, which are refused otherwise")  # fmt: skip
    add("--column", help="with --from mds or parquet: the column of ids (default: tokens, "
        "input_ids or ids)")  # fmt: skip
    add("--dtype", help="with --from nanogpt, or mds with a column of bytes: the integers in it, "
        "such as int64 (default: uint16)")  # fmt: skip
    add("--shard_tokens", metavar="N", help="with --from: maximum tokens of a shard (default: "
        "134217728)")  # fmt: skip


def run(options: argparse.Namespace) -> None:
    problems = Problems()
    if (options.source is None) == (options.target is None):
        problems.lines.append("convert: needs either --from FORMAT or --to FORMAT. Give one.")
        problems.refuse()
    flags = ("tokenizer", "boundaries", "append_eos", "column", "dtype", "shard_tokens")
    for name in flags if options.target else ():
        if getattr(options, name):
            problems.lines.append(f"--{name}: applies to --from only. Leave it out.")
    problems.outside_of_inputs(options.output, options.inputs)
    (_to_shards if options.source else _from_shards)(options, problems)


def _to_shards(options: argparse.Namespace, problems: Problems) -> None:
    from data_prep.finished_shards import to_shards
    from data_prep.finished_shards.formats import FORMATS
    from data_prep.finished_shards.items import InputFile, ReadOptions
    from data_prep.finished_shards.output import space_problems
    from data_prep.tokenizer.load import load_tokenizer
    from zerolm.shards.manifest import MANIFEST, token_dtype
    from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

    form, tokenizer = FORMATS[options.source], None
    files: list[InputFile] = []
    problems.shard_output(options.output)
    if options.tokenizer is None:
        problems.lines.append("--tokenizer: is missing. Give the tokenizer that made the ids.")
    else:
        tokenizer = problems.collect(load_tokenizer, options.tokenizer)
    for name in ("column", "dtype"):
        if getattr(options, name) is not None and name not in form.options:
            problems.lines.append(f"--{name}: does not apply to {options.source}. Leave it out.")
    if options.boundaries == "items" and options.source == "nanogpt":
        problems.lines.append("--boundaries items: nanogpt files have none. Leave it out.")
    shard_tokens = problems.number(
        "shard_tokens", options.shard_tokens, 1, default=DEFAULT_SHARD_TOKENS
    )
    dtype = options.dtype
    if tokenizer is not None and options.source == "nanogpt" and dtype is None:
        dtype = token_dtype(tokenizer.vocab_size).name
    for path in options.inputs:
        if not is_url(str(path)) and (path / MANIFEST).is_file():
            problems.lines.append(f"{path}: holds token shards already. Convert them with --to.")
        elif is_url(str(path)):
            problems.lines.append(f"{path}: other formats are read from this machine. Copy it.")
        else:
            files += problems.collect(form.find, path, ReadOptions(options.column, dtype)) or []
            if tokenizer is not None:
                problems.lines += _tokenizer_problems(path, tokenizer)
    problems.lines += space_problems(options.output, sum(file.size_bytes for file in files))
    problems.refuse()
    assert tokenizer is not None
    print_notes(tokenizer.notices)
    rules = to_shards.Rules(options.boundaries or to_shards.ITEMS, options.append_eos, shard_tokens)
    arguments = [str(path) for path in options.inputs]
    manifest = to_shards.convert(
        files, arguments, tokenizer, options.output, rules, provenance()
    )  # fmt: skip
    made = manifest["convert"]
    print(f"read: {made['read_ids']:,} ids of {len(files):,} {options.source} files")
    print(
        f"{options.output}: {manifest['num_documents']:,} documents, {manifest['num_tokens']:,} "
        f"tokens, {len(manifest['shards'])} shards"
    )
    for key, what in (("appended_eos", "added"), ("dropped_eos", "left out, before a document")):
        if made[key]:
            print(f"note: {made[key]:,} EOS ids were {what}")
    if empty := manifest["skipped_documents"].get("empty"):
        print(f"skipped: {empty:,} documents without ids")


def _tokenizer_problems(path: Path, tokenizer: Any) -> list[str]:
    """Compare a tokenizer with that of shards from which `convert --to` made an input."""
    directory = path if path.is_dir() else path.parent
    try:
        made = json.loads((directory / "_provenance.json").read_bytes())["tokenizer"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # made by another program
    if made == tokenizer.fingerprint:
        return []
    return [
        f"--tokenizer {tokenizer.name}: is not the one of {path} (its ids differ). Use "
        f"{directory / '_tokenizer'}."
    ]


def _from_shards(options: argparse.Namespace, problems: Problems) -> None:
    from data_prep.finished_shards import from_shards
    from data_prep.finished_shards.formats import FORMATS
    from data_prep.finished_shards.output import space_problems
    from zerolm.shards import reader

    found = [problems.collect(reader.open_source, path) for path in options.inputs]
    sources = [source for source in found if source is not None]
    problems.lines += from_shards.differences(sources) if sources else []
    problems.lines += from_shards.output_problems(options.output)
    size = sum(source.num_tokens * source.dtype.itemsize for source in sources)
    size += 20 * sum(source.num_documents for source in sources)
    problems.lines += space_problems(options.output, size)
    for source in sources:
        if not source.has_checksums and not problems.lines:
            problems.collect(reader.verify, source.directory)
    problems.refuse()
    write = FORMATS[options.target].write
    assert write is not None
    record = from_shards.convert(sources, write, options.output, provenance())
    print(
        f"{options.output}: {record['num_documents']:,} documents, {record['num_tokens']:,} tokens "
        f"as {options.target}, {len(record['files'])} files"
    )
