"""`repeats`: remove lines, paragraphs or substrings that occur earlier in the corpus."""

import argparse

from data_prep.cli.problems import Problems
from data_prep.cli.stage_command import add_stage_flags, print_summary, run_stage


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_stage_flags(parser)
    add = parser.add_argument
    add(
        "--unit",
        metavar="lines|paragraphs|substrings",
        default="lines",
        help="what is compared: lines or paragraphs by their words, or substrings character by "
        "character (default: lines)",
    )
    add(
        "--min_words",
        metavar="N",
        help="shorter lines and paragraphs are always kept (default: 8)",
    )
    add(
        "--min_characters",
        metavar="N",
        help="length from which a repeated substring is removed (default: 200)",
    )
    add(
        "--memory",
        metavar="BYTES",
        help="memory of a process that sorts hashes; does not change the result (default: 1GiB)",
    )


def run(options: argparse.Namespace) -> None:
    from data_prep.dedup.repeats import NOTES, RepeatsOptions, run_repeats

    problems = Problems()
    unused = "min_words" if options.unit == "substrings" else "min_characters"
    if getattr(options, unused) is not None:
        problems.lines.append(f"--{unused}: has no effect with --unit {options.unit}. Remove it.")
    chosen = RepeatsOptions(
        unit=options.unit,
        min_words=problems.number("min_words", options.min_words, 1, default=8),
        min_characters=problems.number("min_characters", options.min_characters, 1, default=200),
        memory_bytes=problems.size("memory", options.memory, 1, default=1 << 30),
    )
    flags = {"memory_bytes": "memory"}
    manifest, seconds = run_stage(options, problems, chosen, run_repeats, flags)
    changed = sum(manifest["changed"].values())
    removed = manifest["removed_bytes"] / 1e6
    print(f"removed     {removed:,.1f} MB of repeated {options.unit} from {changed:,} documents")
    print_summary(options.output, manifest, seconds, options.output / NOTES)
