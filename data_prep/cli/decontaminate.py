"""`decontaminate`: drop documents that contain parts of evaluation sets."""

import argparse

from data_prep.cli.problems import Problems
from data_prep.cli.stage_command import add_stage_flags, print_summary, run_stage


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_stage_flags(parser)
    add = parser.add_argument
    add(
        "--evaluation",
        required=True,
        nargs="+",
        action="extend",
        metavar="PATH[:FIELD,...]",
        help="evaluation sets: JSON lines of HellaSwag, .txt (one item per paragraph), "
        ".jsonl(.gz, .zst) or .parquet with the fields to search for (default: text)",
    )
    add("--ngram_words", metavar="N", help="consecutive words that make a match (default: 13)")
    add(
        "--min_overlap",
        metavar="F",
        help="fraction of an item's n-grams that must be found (default: 0, one n-gram is enough)",
    )
    add("--min_item_words", metavar="N", help="ignore texts shorter than this (default: 5)")


def run(options: argparse.Namespace) -> None:
    from data_prep.dedup.decontaminate import CONTAMINATED, DecontaminateOptions, run_decontaminate

    problems = Problems()
    chosen = DecontaminateOptions(
        evaluation=tuple(options.evaluation),
        ngram_words=problems.number("ngram_words", options.ngram_words, 1, default=13),
        min_overlap=problems.fraction("min_overlap", options.min_overlap, 0.0),
        min_item_words=problems.number("min_item_words", options.min_item_words, 1, default=5),
    )
    problems.collect(chosen.read_items)
    manifest, seconds = run_stage(options, problems, chosen, run_decontaminate, {})
    print(f"searched    {manifest['items']:,} items, {manifest['texts']:,} texts")
    if manifest["texts_too_short"]:
        print(
            f"ignored     {manifest['texts_too_short']:,} texts of fewer than "
            f"{chosen.min_item_words} words"
        )
    print_summary(options.output, manifest, seconds, options.output / CONTAMINATED)
