"""`decode-batch`: print the text of a batch, with the source and documents of each row."""

import argparse
from pathlib import Path

from zerolm.common.command_line import count_from_zero


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--step", type=count_from_zero, metavar="N", help="print the batch of this optimizer step"
    )
    chosen.add_argument(
        "--sequences",
        metavar="A-B",
        help="print the sequences from number A up to, but not including, B; or a single sequence",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.report.decode_batch import decode_batch

    for line in decode_batch(arguments.run, arguments.step, arguments.sequences):
        print(line)
