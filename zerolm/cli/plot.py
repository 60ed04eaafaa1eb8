"""`plot`: draw the loss curves of runs as a PNG."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="PNG file to write (default: loss.png in the first run directory)",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.report.plot import plot_losses

    print(plot_losses(arguments.runs, arguments.output))
