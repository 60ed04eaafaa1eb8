"""`convert`: convert token ids from other programs' formats to token shards."""

import argparse

from data_prep.cli.input_flags import add_output_flag, print_notes, provenance
from data_prep.cli.problems import Problems
from zerolm.common.url import is_url, path_or_url

OPTIONS = {  # that apply to each format
    "megatron": (),
    "mds": ("column", "dtype"),
    "litdata": (),
    "parquet": ("column",),
    "nanogpt": ("dtype",),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        type=path_or_url,
        metavar="INPUT",
        help="files, prefixes or directories in this format",
    )
    add("--from", dest="source", required=True, choices=tuple(OPTIONS), help="the format to read")
    add_output_flag(parser, "DIR", "a new directory")
    add("--tokenizer", metavar="DIR", help="the tokenizer that produced the ids")
    add(
        "--boundaries",
        choices=("items", "eos", "bos"),
        help="where documents end: items of the format, EOS ids, or before BOS ids (default: "
        "items; eos for nanogpt, which has no items)",
    )
    add(
        "--append_eos",
        action="store_true",
        help="append the EOS id to documents that do not end with it; without this flag, they are "
        "refused",
    )
    add(
        "--column",
        help="for mds and parquet: the column of ids (default: tokens, input_ids or ids)",
    )
    add(
        "--dtype",
        help="for nanogpt, and mds with a column of bytes: the integer type, such as int64 "
        "(default: uint16)",
    )
    add("--shard_tokens", metavar="N", help="maximum tokens per shard (default: 134217728)")


def run(options: argparse.Namespace) -> None:
    from data_prep.finished_shards import litdata, mds, megatron, nanogpt, parquet, to_shards
    from data_prep.finished_shards.items import InputFile, ReadOptions
    from data_prep.finished_shards.output import space_problems
    from data_prep.tokenizer.load import load_tokenizer, require_bos
    from zerolm.shards.manifest import MANIFEST, token_dtype
    from zerolm.shards.writer import DEFAULT_SHARD_TOKENS

    readers = {"megatron": megatron, "mds": mds, "litdata": litdata, "parquet": parquet,
               "nanogpt": nanogpt}  # fmt: skip
    problems, tokenizer = Problems(), None
    files: list[InputFile] = []
    problems.outside_of_inputs(options.output, options.inputs)
    problems.shard_output(options.output)
    if options.tokenizer is None:
        problems.lines.append("--tokenizer: is missing. Give the tokenizer that produced the ids.")
    else:
        tokenizer = problems.collect(load_tokenizer, options.tokenizer)
    if options.boundaries == "bos" and tokenizer is not None:
        problems.collect(require_bos, tokenizer, "--boundaries bos")
    for name in ("column", "dtype"):
        if getattr(options, name) is not None and name not in OPTIONS[options.source]:
            problems.lines.append(f"--{name}: does not apply to {options.source}. Leave it out.")
    if options.boundaries == "items" and options.source == "nanogpt":
        problems.lines.append("--boundaries items: nanogpt files have no items. Remove the flag.")
    shard_tokens = problems.number(
        "shard_tokens", options.shard_tokens, 1, default=DEFAULT_SHARD_TOKENS
    )
    dtype = options.dtype
    if tokenizer is not None and options.source == "nanogpt" and dtype is None:
        dtype = token_dtype(tokenizer.vocab_size).name
    find = readers[options.source].find
    for path in options.inputs:
        if is_url(str(path)):
            problems.lines.append(
                f"{path}: only token shards can be read from a URL. Copy the files to this machine."
            )
        elif (path / MANIFEST).is_file():
            problems.lines.append(f"{path}: holds token shards already. Give it to --data.")
        else:
            files += problems.collect(find, path, ReadOptions(options.column, dtype)) or []
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
    print(f"read: {made['read_ids']:,} ids from {len(files):,} {options.source} files")
    print(
        f"{options.output}: {manifest['num_documents']:,} documents, {manifest['num_tokens']:,} "
        f"tokens, {len(manifest['shards'])} shards"
    )
    for key, what in (("appended_eos", "added"), ("dropped_eos", "dropped before a document")):
        if made[key]:
            print(f"note: {made[key]:,} EOS ids were {what}")
    if empty := manifest["skipped_documents"].get("empty"):
        print(f"skipped: {empty:,} documents without ids")
