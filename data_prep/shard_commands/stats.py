"""`stats`: measure document lengths, token ids and duplicates of token shards."""

import argparse
from pathlib import Path
from typing import Any

from data_prep.cli.input_flags import add_workers_flag
from data_prep.cli.problems import Problems
from zerolm.common.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("shards", nargs="+", type=Path, metavar="SHARDS", help="shard directories")
    add("--output", type=Path, metavar="FILE", help="write an HTML report (.html) or a plot (.png)")
    add("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    add("--top", metavar="N", help="number of most frequent ids to list (default: 50)")
    add_workers_flag(parser)


def run(options: argparse.Namespace) -> None:
    from data_prep.inspect import stats as measure
    from data_prep.inspect import stats_report
    from data_prep.tasks.progress import Progress
    from zerolm.common.files import write_atomically, write_json
    from zerolm.shards.reader import open_source

    problems = Problems()
    workers = problems.workers(options.workers)
    top = problems.number("top", options.top, 1, 100_000, default=50)
    sources = [problems.collect(open_source, directory) for directory in options.shards]
    for flag, output in (("output", options.output), ("json", options.json)):
        if output is not None and not output.parent.is_dir():
            problems.lines.append(
                f"--{flag} {output}: {output.parent} is not a directory. Make it, or choose "
                f"another."
            )
    if options.output is not None and options.output.suffix not in (".html", ".png"):
        problems.lines.append(f"--output {options.output}: must end in .html or .png. Rename it.")
    problems.refuse()
    progress = Progress("stats", sum(source.num_tokens for source in sources))
    try:
        found = measure.measure_shards(sources, workers, top, progress)
    finally:
        progress.close()
    for line in stats_report.text_lines(found):
        print(line)
    if options.json is not None:
        write_json(options.json, {"sources": found})
        print(f"figures: {options.json}")
    if options.output is not None:
        if options.output.suffix == ".png":
            content = stats_report.plot(found)
        else:
            decoders = [_decoder(source) for source in sources]
            content = stats_report.html_report(found, decoders).encode()
        write_atomically(options.output, content)
        print(f"page: {options.output}")


def _decoder(source: Any) -> Any:
    """Return the decoder of a source's ids; None if its tokenizer is not available."""
    from zerolm.data.window_text import source_decoder

    try:
        return source_decoder(source)
    except ConfigError:
        return None
