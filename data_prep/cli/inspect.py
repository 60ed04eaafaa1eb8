"""`inspect`: print a training sequence or a document as text."""

import argparse

from data_prep.cli.problems import Problems
from zerolm.common.url import path_or_url

LIMIT = (1 << 62) - 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("shards", type=path_or_url, metavar="SHARDS", help="a shard directory or URL")
    add("--sequence", metavar="N", help="the window to print, numbered from 0")
    add("--seq_len", metavar="T", help="with --sequence: tokens per sequence")
    add(
        "--packing",
        choices=("concat", "best_fit"),
        help="with --sequence: how documents are packed into sequences (default: concat)",
    )
    add("--document", metavar="N", help="the document to print in full, numbered from 0")
    add("--json", action="store_true", help="print a JSON object")


def run(options: argparse.Namespace) -> None:
    from data_prep.finished_shards import sequences
    from zerolm.shards.reader import open_source

    problems = Problems()
    if (options.sequence is None) == (options.document is None):
        problems.lines.append("inspect: needs --sequence N or --document N. Give one of them.")
    elif options.document is None and options.seq_len is None:
        problems.lines.append(
            "--sequence: needs --seq_len T, the number of tokens per sequence. Add it."
        )
    for name in ("seq_len", "packing") if options.document is not None else ():
        if (value := getattr(options, name)) is not None:
            problems.lines.append(f"--{name} {value}: does not apply to --document. Leave it out.")
    sequence = problems.number("sequence", options.sequence, 0, LIMIT)
    seq_len = problems.number("seq_len", options.seq_len, 1, LIMIT)
    document = problems.number("document", options.document, 0, LIMIT)
    source = problems.collect(open_source, options.shards)
    problems.refuse()
    if options.document is not None:
        excerpt = sequences.document_excerpt(source, document)
    else:
        packing = options.packing or "concat"
        excerpt = sequences.window_excerpt(source, sequence, seq_len, packing)
    if options.json:
        print(sequences.json_line(excerpt))
    else:
        for line in sequences.text_lines(excerpt):
            print(line)
