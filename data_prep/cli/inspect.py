"""`inspect`: print training sequences as text."""

import argparse
import sys
from pathlib import Path

from data_prep.cli.problems import Problems
from zerolm.common.url import path_or_url

LIMIT = (1 << 62) - 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "shards",
        nargs="?",
        type=path_or_url,
        metavar="SHARDS",
        help="a shard directory or URL, instead of --run",
    )
    add("--run", type=Path, metavar="RUN", help="a run directory, to show the data of the run")
    add(
        "--sequence",
        metavar="N",
        help="a window of SHARDS, or a sequence of the run, numbered from 0",
    )
    add("--seq_len", metavar="T", help="with SHARDS: tokens per sequence")
    add(
        "--seed",
        metavar="S",
        help="with SHARDS: shuffle as a run with this seed; --sequence then numbers the shuffled "
        "sequences",
    )
    add(
        "--packing",
        choices=("concat", "best_fit"),
        default="concat",
        help="with SHARDS: how documents are packed into sequences (default: concat)",
    )
    add("--document", metavar="N", help="with SHARDS: a complete document, numbered from 0")
    add("--step", metavar="K", help="with --run: the batch of this optimizer step, from 1")
    add("--row", metavar="R", help="with --step: one row of the batch, from 0")
    add("--json", action="store_true", help="print one JSON object per line")


def run(options: argparse.Namespace) -> None:
    from data_prep.finished_shards import sequences
    from zerolm.shards.reader import open_source

    problems = Problems()
    _check(options, problems)
    sequence = problems.number("sequence", options.sequence, 0, LIMIT)
    seq_len = problems.number("seq_len", options.seq_len, 1, LIMIT)
    seed = problems.number("seed", options.seed, -(1 << 63), (1 << 63) - 1)
    document = problems.number("document", options.document, 0, LIMIT)
    step = problems.number("step", options.step, 1, LIMIT)
    row = problems.number("row", options.row, 0, LIMIT)
    source = None if options.shards is None else problems.collect(open_source, options.shards)
    problems.refuse()
    notes: list[str] = []
    if options.run is not None:
        excerpts, notes = sequences.run_excerpts(
            options.run,
            None if options.sequence is None else sequence,
            None if options.step is None else step,
            None if options.row is None else row,
        )
    elif source is None:
        raise AssertionError("_check has refused this")
    elif options.document is not None:
        excerpts = [sequences.document_excerpt(source, document)]
    else:
        given = None if options.seed is None else seed
        excerpts = [sequences.window_excerpt(source, sequence, seq_len, given, options.packing)]
    for note in notes:
        print(note, file=sys.stderr)
    for line in (sequences.json_lines if options.json else sequences.text_lines)(excerpts):
        print(line)


def _check(options: argparse.Namespace, problems: Problems) -> None:
    """Find flags that are missing, and flags that do not apply to the selection."""
    if (options.shards is None) == (options.run is None):
        problems.lines.append("inspect: needs either SHARDS or --run RUN. Give one of them.")
        return
    subject, selectors = "SHARDS", ("sequence", "document")
    if options.run is not None:
        subject, selectors = "--run", ("sequence", "step")
    given = [
        name for name in ("sequence", "document", "step") if getattr(options, name) is not None
    ]
    if len(given) != 1 or given[0] not in selectors:
        choice = " or ".join(f"--{name} N" for name in selectors)
        problems.lines.append(f"inspect: {subject} needs {choice}. Give one of them.")
        return
    allowed = {"step": {"row"}, "document": set(), "sequence": {"seq_len", "seed", "packing"}}
    applicable = allowed[given[0]] if options.run is None or given == ["step"] else set()
    default = {"packing": "concat"}
    for name in ("seq_len", "seed", "row", "packing"):
        if getattr(options, name) != default.get(name) and name not in applicable:
            problems.lines.append(
                f"--{name} {getattr(options, name)}: does not apply to --{given[0]} of {subject}. "
                f"Leave it out."
            )
    if given == ["sequence"] and options.run is None and options.seq_len is None:
        problems.lines.append("--sequence: needs --seq_len T, the tokens of a sequence. Add it.")
