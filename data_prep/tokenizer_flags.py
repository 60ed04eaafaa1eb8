"""The flags of `train-tokenizer` and `compare-tokenizers`."""

import argparse
from pathlib import Path

from data_prep.input_flags import add_input_flags

COMPARED_BYTES = 8_000_000


def add_train_tokenizer(train: argparse.ArgumentParser) -> None:
    """Add the flags of train-tokenizer."""
    add_input_flags(train)
    train.add_argument(
        "--vocab_size", required=True, metavar="N", help="ids in all: special, bytes and merges"
    )
    train.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new directory")
    train.add_argument(
        "--sample_bytes",
        metavar="N",
        help="train on this much text, chosen by a hash from each --input as its size is "
        "(default: on all of it)",
    )
    train.add_argument(
        "--split", default="gpt2", help="pieces never merged: gpt2 (default), llama3 or o200k"
    )
    train.add_argument(
        "--digits", help="digits in one piece: 1, 3 or any (default: as --split has it)"
    )
    train.add_argument(
        "--whitespace",
        default="runs",
        help="runs: may become one token (default); single: each character is a piece",
    )
    train.add_argument(
        "--special_tokens",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="beside the EOS token, with the ids 1, 2, ...",
    )
    train.add_argument(
        "--min_frequency", metavar="N", help="how often a pair is there to be merged (default: 0)"
    )


def add_compare_tokenizers(compare: argparse.ArgumentParser) -> None:
    """Add the flags of compare-tokenizers."""
    add_input_flags(compare)
    compare.add_argument(
        "--tokenizer",
        required=True,
        nargs="+",
        action="extend",
        metavar="DIR",
        help="a Hugging Face tokenizer directory or hub id, or tiktoken:<encoding>; repeated",
    )
    compare.add_argument(
        "--sample_bytes", metavar="N", help=f"text to compare on (default: {COMPARED_BYTES})"
    )
    compare.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the comparison: .json or .html"
    )
