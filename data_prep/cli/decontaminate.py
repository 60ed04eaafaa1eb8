"""`decontaminate`: drop documents that contain parts of evaluation sets."""

import argparse

from data_prep.cli.problems import Problems
from data_prep.cli.stage_command import add_stage_flags, print_summary, run_stage
from data_prep.dedup.options import DecontaminateOptions


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_stage_flags(parser, DecontaminateOptions)


def run(options: argparse.Namespace) -> None:
    from data_prep.dedup.decontaminate import CONTAMINATED, run_decontaminate
    from data_prep.dedup.evaluation_items import read_all_items

    problems = Problems()
    chosen = problems.options(DecontaminateOptions, options)
    problems.collect(read_all_items, chosen.evaluation)
    manifest, seconds = run_stage(options, problems, chosen, run_decontaminate)
    print(f"searched    {manifest['items']:,} items, {manifest['texts']:,} texts")
    if manifest["texts_too_short"]:
        print(
            f"ignored     {manifest['texts_too_short']:,} texts with fewer than "
            f"{chosen.min_item_words} words"
        )
    print_summary(options.output, manifest, seconds, options.output / CONTAMINATED)
