"""`verify`: verify the checksums of token shards and their packing indices."""

import argparse
import sys

from data_prep.cli.problems import Problems
from zerolm.common.url import path_or_url


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shards", nargs="+", type=path_or_url, metavar="SHARDS", help="shard directories or URLs"
    )


def run(options: argparse.Namespace) -> None:
    from zerolm.data import packing
    from zerolm.shards import reader

    problems = Problems()
    for directory in options.shards:
        manifest = problems.collect(reader.verify, directory)
        damaged = packing.verify_packings(reader.open_source(directory)) if manifest else []
        problems.lines += damaged
        if manifest is not None and "digest" not in manifest:
            print(
                f"note: {directory}: manifest.json has no digest, so only values that can be "
                "recounted from the tokens are checked",
                file=sys.stderr,
            )
        if manifest is not None and not damaged:
            print(
                f"{directory}: complete. {manifest['num_documents']:,} documents, "
                f"{manifest['num_tokens']:,} tokens, {len(manifest['shards'])} shards"
            )
    problems.refuse()
