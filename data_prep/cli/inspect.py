"""`python -m data_prep inspect | stats`: a look at token shards, and at what a run reads."""

import argparse
import os
import sys
from typing import Any

from data_prep.command_line import Problems

LIMIT = (1 << 62) - 1


def inspect(options: argparse.Namespace) -> None:
    from data_prep import inspect as look
    from zerolm.shards import open_source

    problems = Problems()
    _check_inspect(options, problems)
    sequence = problems.number("sequence", options.sequence, 0, LIMIT)
    seq_len = problems.number("seq_len", options.seq_len, 1, LIMIT)
    seed = problems.number("seed", options.seed, -(1 << 63), (1 << 63) - 1)
    document = problems.number("document", options.document, 0, LIMIT)
    step = problems.number("step", options.step, 1, LIMIT)
    row = problems.number("row", options.row, 0, LIMIT)
    source = None if options.shards is None else problems.of(open_source, options.shards)
    problems.refuse()
    notes: list[str] = []
    if options.run is not None:
        excerpts, notes = look.run_excerpts(
            options.run,
            None if options.sequence is None else sequence,
            None if options.step is None else step,
            None if options.row is None else row,
        )
    elif source is None:
        raise AssertionError("refused above")
    elif options.document is not None:
        excerpts = [look.document_excerpt(source, document)]
    else:
        given = None if options.seed is None else seed
        excerpts = [look.window_excerpt(source, sequence, seq_len, given, options.packing)]
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for note in notes:
        print(note, file=sys.stderr)
    for line in (look.as_json if options.json else look.lines)(excerpts):
        print(line)


def _check_inspect(options: argparse.Namespace, problems: Problems) -> None:
    """Find flags that are missing, and those that say nothing about what was asked for."""
    if (options.shards is None) == (options.run is None):
        problems.lines.append(
            "inspect: needs either SHARDS or --run RUN. Give the one whose data is to be shown."
        )
        return
    what, fitting = ("SHARDS", ("sequence", "document"))
    if options.run is not None:
        what, fitting = ("--run", ("sequence", "step"))
    given = [
        name for name in ("sequence", "document", "step") if getattr(options, name) is not None
    ]
    if len(given) != 1 or given[0] not in fitting:
        choice = " or ".join(f"--{name} N" for name in fitting)
        problems.lines.append(f"inspect: {what} needs {choice}. Give one of them.")
        return
    allowed = {"step": {"row"}, "document": set(), "sequence": {"seq_len", "seed", "packing"}}
    fits = allowed[given[0]] if options.run is None or given == ["step"] else set()
    default = {"packing": "concat"}
    for name in ("seq_len", "seed", "row", "packing"):
        if getattr(options, name) != default.get(name) and name not in fits:
            problems.lines.append(
                f"--{name} {getattr(options, name)}: says nothing about --{given[0]} of {what}. "
                f"Leave it out."
            )
    if given == ["sequence"] and options.run is None and options.seq_len is None:
        problems.lines.append("--sequence: needs --seq_len T, the tokens of a sequence. Add it.")


def stats(options: argparse.Namespace) -> None:
    from data_prep import stats as measure
    from data_prep import stats_page
    from data_prep.progress import Progress
    from zerolm.files import write_atomically, write_json
    from zerolm.shards import open_source

    problems = Problems()
    cores = len(os.sched_getaffinity(0))
    workers = problems.number("workers", options.workers, 1, 4096, default=cores)
    top = problems.number("top", options.top, 1, 100_000, default=50)
    sources = [problems.of(open_source, directory) for directory in options.shards]
    for flag, output in (("output", options.output), ("json", options.json)):
        if output is not None and not output.parent.is_dir():
            problems.lines.append(
                f"--{flag} {output}: {output.parent} is no directory. Make it, or choose another."
            )
    if options.output is not None and options.output.suffix not in (".html", ".png"):
        problems.lines.append(f"--output {options.output}: must end in .html or .png. Rename it.")
    problems.refuse()
    progress = Progress("stats", sum(source.num_tokens for source in sources))
    try:
        found = measure.measure(sources, workers, top, progress)
    finally:
        progress.close()
    for line in stats_page.lines(found):
        print(line)
    if options.json is not None:
        write_json(options.json, {"sources": found})
        print(f"figures: {options.json}")
    if options.output is not None:
        if options.output.suffix == ".png":
            content = stats_page.picture(found)
        else:
            decoders = [_decoder(source) for source in sources]
            content = stats_page.page(found, decoders).encode()
        write_atomically(options.output, lambda file: file.write(content))
        print(f"page: {options.output}")


def _decoder(source: Any) -> Any:
    """Return what makes text of a source's ids, or None: ids are shown then."""
    from zerolm.errors import ConfigError
    from zerolm.excerpts import decoder_of

    try:
        return decoder_of(source)
    except ConfigError:
        return None
