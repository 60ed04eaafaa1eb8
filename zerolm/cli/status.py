"""`status`: print the state of runs, read from their files."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="update every two seconds")
    form.add_argument("--json", action="store_true", help="print one line of JSON per run")


def run(arguments: argparse.Namespace) -> None:
    from zerolm.report.status import print_status

    print_status(arguments.runs, watch=arguments.watch, as_json=arguments.json)
