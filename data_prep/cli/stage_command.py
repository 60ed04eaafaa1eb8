"""Code shared by `dedup` and `decontaminate`: flags, checks, opening the input, and the summary."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.cli.input_flags import (
    add_input_flags,
    add_output_flag,
    add_workers_flag,
    input_rules,
    print_notes,
)
from data_prep.cli.problems import Problems
from data_prep.files.documents import InputRules
from data_prep.formats import describe_reason
from data_prep.read.bad_input import describe_skipped
from data_prep.stages.options import add_option_flags
from zerolm.common.errors import ConfigError

Json = dict[str, Any]


def add_stage_flags(parser: argparse.ArgumentParser, options_class: type) -> None:
    """Add the flags for input, output and workers, and the flags for the stage's options."""
    add_input_flags(parser)
    add_output_flag(parser, "DIR", "a new directory for the documents that are kept (a stage)")
    add_workers_flag(parser)
    add_option_flags(parser, options_class)


def run_stage(
    options: argparse.Namespace,
    problems: Problems,
    chosen: Any,
    run: Callable[..., Json],
) -> tuple[Json, float]:
    """Check all flags and inputs, run a stage, and return its `stage.json` and its duration in
    seconds.
    """
    from data_prep.stages.output_rules import output_problems, overlap_problems
    from data_prep.tasks.phases import LocalExecutor

    workers = problems.workers(options.workers)
    problems.lines += output_problems(options.output)
    problems.lines += overlap_problems(options.output, options.input)
    rules = input_rules(options, problems)
    given = problems.collect(_open, options.input, rules, options.output)
    problems.refuse()
    start = time.monotonic()
    shown = set()

    def show(phase: Any, record: Json) -> None:
        if phase.name not in shown:
            shown.add(phase.name)
            print(f"{phase.name}: {phase.num_tasks} tasks", file=sys.stderr, flush=True)

    manifest = run(chosen, given, options.output, LocalExecutor(workers, show))
    return manifest, time.monotonic() - start


def _open(arguments: list[str], rules: InputRules, output: Path) -> Any:
    """Open a stage or other inputs; if inputs are large and cannot be split, they are first read
    into a stage.
    """
    from data_prep.filters.clean import CleanOptions, run_clean
    from data_prep.read.discovery import find_inputs
    from data_prep.read.stage_files import check_text_field, is_stage, read_stage
    from data_prep.stages.documents import input_documents, stage_documents
    from data_prep.stages.output_rules import overlap_problems

    if len(arguments) == 1 and is_stage(arguments[0]):
        stage = read_stage(arguments[0])
        check_text_field(stage, rules.text_field)
        return stage_documents(stage)
    skip = rules.on_bad_input == "skip"
    inputs, notes = find_inputs(arguments, rules.text_field, skip, rules.encoding, rules.code)
    if overlaps := overlap_problems(output, (), inputs):
        raise ConfigError(overlaps)
    print_notes(notes)

    def read(rules: InputRules, directory: Path, executor: Any) -> Any:
        print(
            (f"{directory}: reading the input into a stage, since it cannot be split"),
            file=sys.stderr,
        )
        run_clean(CleanOptions((), rules), inputs, directory, executor, {})
        return read_stage(directory)

    return input_documents(inputs, rules, read)


def print_summary(output: Path, manifest: Json, seconds: float, details: Path) -> None:
    """Print how much was dropped and why, and the processing speed."""
    before, after = manifest["documents_in"], manifest["documents_out"]
    print(
        f"documents   {before:,} -> {after:,}, {manifest['text_bytes_in'] / 1e6:,.1f} -> "
        f"{manifest['text_bytes_out'] / 1e6:,.1f} MB of text"
    )
    for reason, count in manifest["dropped"].items():
        size = manifest["dropped_bytes"][reason] / 1e6
        print(f"dropped     {count:,} {reason.replace('_', ' ')}, {size:,.1f} MB")
    for what, count in describe_skipped(manifest["skipped_documents"]).items():
        print(f"skipped     {count:,} {what}")
    for reason, count in manifest["bad_documents"].items():
        print(f"skipped     {count:,} {describe_reason(reason)}")
    print(f"listed in   {details}")
    rate = manifest["text_bytes_in"] / 1e6 / max(seconds, 1e-9)
    print(f"seconds     {seconds:,.1f}, {rate:,.1f} MB/s of text")
    if not after:
        print(f"note        {output}: no documents are left. Check the options.")
