"""`dedup`: drop exact copies and near-duplicates of documents."""

import argparse

from data_prep.cli.problems import Problems
from data_prep.cli.stage_command import add_stage_flags, print_summary, run_stage


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_stage_flags(parser)
    add = parser.add_argument
    add(
        "--threshold",
        metavar="J",
        help="near-duplicates are pairs whose sets of shingles have at least this Jaccard "
        "similarity (default: 0.8)",
    )
    add("--shingle_words", metavar="N", help="words in a shingle (default: 13)")
    add(
        "--exact",
        metavar="text|words",
        default="text",
        help="exact copies have the same text, or the same words (default: text)",
    )
    add("--near", metavar="on|off", default="on", help="off: find exact copies only (default: on)")
    add(
        "--permutations",
        metavar="N",
        help="largest number of values in a MinHash signature (default: 128)",
    )
    add(
        "--memory",
        metavar="BYTES",
        help="memory of a process that sorts hashes; does not change the result (default: 1GiB)",
    )

    add(
        "--against",
        metavar="DIR",
        nargs="+",
        action="extend",
        default=[],
        help="outputs of earlier dedup runs with signatures: documents that duplicate one of "
        "theirs are dropped, as in one pass over everything in this order",
    )
    add(
        "--keep_signatures",
        metavar="on|off",
        default="off",
        help="on: write OUTPUT/signatures, about 450 bytes a document and 8 a word, for a later "
        "--against (default: off)",
    )


def run(options: argparse.Namespace) -> None:
    from data_prep.dedup.dedup import DUPLICATES, DedupOptions, run_dedup
    from data_prep.dedup.signatures import against_problems, unrelated

    problems = Problems()
    switches = {}
    for flag in ("near", "keep_signatures"):
        switches[flag] = getattr(options, flag) == "on"
        if getattr(options, flag) not in ("on", "off"):
            problems.lines.append(f"--{flag} {getattr(options, flag)}: is not on or off.")
    chosen = DedupOptions(
        threshold=problems.fraction("threshold", options.threshold, 0.8),
        shingle_words=problems.number("shingle_words", options.shingle_words, 1, default=13),
        exact=options.exact,
        near=switches["near"],
        permutations=problems.number("permutations", options.permutations, 1, default=128),
        memory_bytes=problems.size("memory", options.memory, 1, default=1 << 30),
        keep_signatures=switches["keep_signatures"],
        against=tuple(options.against),
    )
    problems.lines += against_problems(chosen.against, options.output, "--against")
    usable = not problems.lines and not any(chosen.problems())
    against = problems.collect(chosen.open_signatures) if usable else ()
    for one, two in unrelated(against or ()):
        print(
            f"note        {two} was not compared with {one}, so the result may differ from one "
            f"pass over all of them"
        )
    manifest, seconds = run_stage(options, problems, chosen, run_dedup, {"memory_bytes": "memory"})
    if (bands := manifest["bands"]) is not None:
        print(
            f"bands       {bands['bands']} of {bands['rows']} rows: "
            f"{manifest['candidate_pairs']:,} candidate pairs, {manifest['similar_pairs']:,} at "
            f"{chosen.threshold} or above"
        )
        print(
            f"too short   {manifest['documents_without_shingles']:,} documents of fewer than "
            f"{chosen.shingle_words} words: checked for exact copies only"
        )
    for each in manifest.get("against", ()):
        print(f"against     {each['num_documents']:,} documents of {each['name']}")
    if (kept := manifest.get("signatures")) is not None:
        print(
            f"signatures  {kept['size_bytes'] / 1e6:,.1f} MB of {kept['num_documents']:,} documents"
        )
    print_summary(options.output, manifest, seconds, options.output / DUPLICATES)
