"""`table`: write the table with which a run starts on many shards without parsing the manifest."""

import argparse
from pathlib import Path

from data_prep.cli.problems import Problems


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="+", type=Path, metavar="SHARDS", help="shard directories")


def run(options: argparse.Namespace) -> None:
    from zerolm.shards.table import write_table

    problems = Problems()
    for directory in options.shards:
        if path := problems.collect(write_table, directory):
            print(f"{path}: {path.stat().st_size:,} bytes")
    problems.refuse()
