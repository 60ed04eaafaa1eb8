"""`repeats`: remove lines, paragraphs or substrings that occur earlier in the corpus."""

import argparse

from data_prep.cli.problems import Problems
from data_prep.cli.stage_command import add_stage_flags, print_summary, run_stage
from data_prep.dedup.options import RepeatsOptions


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_stage_flags(parser, RepeatsOptions)


def run(options: argparse.Namespace) -> None:
    from data_prep.dedup.repeats import NOTES, run_repeats

    problems = Problems()
    chosen = problems.options(RepeatsOptions, options)
    unused = "min_words" if chosen.unit == "substrings" else "min_characters"
    if getattr(options, unused) is not None:
        problems.lines.append(f"--{unused}: has no effect with --unit {chosen.unit}. Remove it.")
    manifest, seconds = run_stage(options, problems, chosen, run_repeats)
    changed = sum(manifest["changed"].values())
    removed = manifest["removed_bytes"] / 1e6
    print(f"removed     {removed:,.1f} MB of repeated {chosen.unit} from {changed:,} documents")
    print_summary(options.output, manifest, seconds, options.output / NOTES)
