"""`dedup`: drop exact and near-duplicate documents."""

import argparse

from data_prep.cli.problems import Problems
from data_prep.cli.stage_command import add_stage_flags, print_summary, run_stage
from data_prep.dedup.options import DedupOptions, against_problems


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_stage_flags(parser, DedupOptions)


def run(options: argparse.Namespace) -> None:
    from data_prep.dedup.dedup import DUPLICATES, open_against, run_dedup
    from data_prep.dedup.signatures import unrelated

    problems = Problems()
    chosen = problems.options(DedupOptions, options)
    problems.lines += against_problems(chosen.against, options.output, "--against")
    against = () if problems.lines else problems.collect(open_against, chosen)
    for one, two in unrelated(against or ()):
        print(
            f"note        {two} was not compared with {one}, so the result may differ from a "
            "single pass over all documents"
        )
    manifest, seconds = run_stage(options, problems, chosen, run_dedup)
    if (bands := manifest["bands"]) is not None:
        print(
            f"bands       {bands['bands']} of {bands['rows']} rows: "
            f"{manifest['candidate_pairs']:,} candidate pairs, {manifest['similar_pairs']:,} at "
            f"{chosen.threshold} or above"
        )
        print(
            f"too short   {manifest['documents_without_shingles']:,} documents with fewer than "
            f"{chosen.shingle_words} words were only checked for exact copies"
        )
    for each in manifest.get("against", ()):
        print(f"against     {each['num_documents']:,} documents of {each['name']}")
    if (kept := manifest.get("signatures")) is not None:
        print(
            f"signatures  {kept['size_bytes'] / 1e6:,.1f} MB for {kept['num_documents']:,} "
            "documents"
        )
    print_summary(options.output, manifest, seconds, options.output / DUPLICATES)
