"""The flags of `python -m data_prep dedup` and `decontaminate`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.input_flags import add_input_flags

Add = Callable[[Any, str, str], argparse.ArgumentParser]


def add_dedup(commands: Any, add: Add) -> None:
    """Add both commands."""
    dedup = add(commands, "dedup", "drop exact copies and near-duplicates of documents")
    _add_files(dedup)
    dedup.add_argument(
        "--threshold",
        metavar="J",
        help="Jaccard index of two documents' shingles from which they are near-duplicates "
        "(default: 0.8)",
    )
    dedup.add_argument("--shingle_words", metavar="N", help="words of a shingle (default: 13)")
    dedup.add_argument(
        "--exact", default="text", help="copies have the same text, or the same words (text)"
    )
    dedup.add_argument(
        "--near", default="on", help="on, or off: look for exact copies only (default: on)"
    )
    dedup.add_argument(
        "--permutations", metavar="N", help="numbers of a signature, at most (default: 128)"
    )
    dedup.add_argument(
        "--memory",
        metavar="BYTES",
        help="of a process that sorts hashes (default: 2^30); changes no result",
    )
    clean = add(commands, "decontaminate", "drop documents that hold parts of evaluation sets")
    _add_files(clean)
    clean.add_argument(
        "--evaluation",
        required=True,
        nargs="+",
        action="extend",
        metavar="PATH[:FIELD,...]",
        help="HellaSwag's JSON lines, .txt (an item a paragraph), .jsonl(.gz, .zst) or .parquet "
        "with fields to look for (default: text)",
    )
    clean.add_argument(
        "--ngram_words", metavar="N", help="words in a row that are a part (default: 13)"
    )
    clean.add_argument(
        "--min_overlap",
        metavar="F",
        help="part of an item's runs of words to be found (default: 0, where one is enough)",
    )
    clean.add_argument(
        "--min_item_words", metavar="N", help="shorter texts are not looked for (default: 5)"
    )


def _add_files(command: argparse.ArgumentParser) -> None:
    add_input_flags(command)
    command.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="a new directory; a stage"
    )
    command.add_argument("--workers", metavar="N", help="processes (default: one a core)")
