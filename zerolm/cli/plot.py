"""`plot`: draw the loss curves of runs as a PNG."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="PNG file to write"
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.report.plot import plot_losses

    plot_losses(arguments.runs, arguments.output)
    print(arguments.output)
