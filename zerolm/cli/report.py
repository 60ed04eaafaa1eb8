"""`report`: write an HTML report on a run, or a comparison of several runs."""

import argparse
from pathlib import Path

from zerolm.common.command_line import count, number


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="run directories; runs may be in progress")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="HTML file to write (default: report.html in the first run directory)",
    )
    add(
        "--price_per_hour",
        metavar="DOLLARS",
        type=number,
        help="price of one device per hour, to show the cost of the run",
    )
    # The process number of the run that started this command.
    add("--of_process", type=count, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    from zerolm.common import child
    from zerolm.report.html import write_report

    if arguments.of_process is not None:
        child.serve(arguments.of_process)
    page = write_report(arguments.runs, arguments.output, arguments.price_per_hour)
    if arguments.of_process is None:
        print(page)
