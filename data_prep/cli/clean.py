"""`clean`: filter documents into a stage."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.cli.input_flags import (
    add_input_flags,
    add_output_flag,
    add_workers_flag,
    find_inputs,
    input_rules,
    print_notes,
)
from data_prep.cli.problems import Problems
from zerolm.common.errors import ConfigError
from zerolm.common.records import parse_json, unreadable


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_input_flags(parser)
    add_output_flag(parser, "DIR", "a new directory for the documents that are kept (a stage)")
    parser.add_argument(
        "--filters",
        required=True,
        type=Path,
        metavar="JSON",
        help="a file with a list of filters, or a recipe",
    )
    add_workers_flag(parser)
    parser.add_argument(
        "--keep_dropped", type=Path, metavar="DIR", help="directory for the dropped documents"
    )


def run(options: argparse.Namespace) -> None:
    from data_prep.filters.clean import CleanOptions, run_clean
    from data_prep.read.bad_input import Tally, summary_lines
    from data_prep.stages.output_rules import dropped_problems, output_problems, overlap_problems
    from data_prep.tasks.executors import print_progress
    from data_prep.tasks.phases import LocalExecutor
    from zerolm.common.provenance import versions

    problems = Problems()
    workers = problems.workers(options.workers)
    rules = replace(input_rules(options, problems), keep_records=True)
    inputs, notes = find_inputs(options, rules, problems)
    filters = problems.collect(_read_filters, options.filters)
    problems.lines += output_problems(options.output)
    problems.lines += overlap_problems(options.output, options.input, inputs)
    if (dropped := options.keep_dropped) is not None:
        problems.lines += dropped_problems(dropped, options.output)
        problems.lines += overlap_problems(dropped, options.input, inputs, "--keep_dropped")
    problems.refuse()
    print_notes(notes)
    listed = [{"file": each.name, "size_bytes": each.size_bytes} for each in inputs]
    start = time.monotonic()
    manifest = run_clean(
        CleanOptions(tuple(filters), rules, keep_dropped=options.keep_dropped),
        inputs,
        options.output,
        LocalExecutor(workers, print_progress),
        {"inputs": listed, "versions": versions()},
    )
    kept, read = manifest["documents_out"], manifest["documents_in"]
    print(f"{options.output}: kept {kept:,} of {read:,} documents")
    for reason, count in sorted(manifest["dropped"].items(), key=lambda item: -item[1]):
        print(f"    {reason:<48}{count:>12,}")
    for line in summary_lines(inputs, Tally.from_records([manifest["reading"]]), rules):
        print(line)
    print(f"seconds: {time.monotonic() - start:,.1f} with {workers} workers")


def _read_filters(path: Path) -> Any:
    """Return the list of filters in a JSON file, which may be an entire recipe."""
    from data_prep.filters.parameters import filter_problems, resolve_model_paths

    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--filters {unreadable(path, error, 'Correct the file.')}") from error
    if isinstance(content, dict):
        content = content.get("clean", {})
        if isinstance(content, dict) and "filters" not in content:
            raise ConfigError(
                f"--filters {path}: has no clean.filters. Give a list of filters, or a recipe."
            )
        content = content["filters"] if isinstance(content, dict) else content
    content = resolve_model_paths(path.parent.resolve(), content)
    if wrong := filter_problems(content, f"{path}"):
        raise ConfigError(wrong)
    return content
