"""`pack`: build the index that assigns documents to sequences, for --packing best_fit."""

import argparse

from data_prep.cli.problems import Problems
from data_prep.pipeline.recipe_options import PackOptions
from data_prep.stages.options import add_option_flags
from zerolm.common.errors import ConfigError
from zerolm.common.url import path_or_url


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shards", nargs="+", type=path_or_url, metavar="SHARDS", help="shard directories"
    )
    add_option_flags(parser, PackOptions)


def run(options: argparse.Namespace) -> None:
    from data_prep.encode.pack import EFFICIENCY_HEADER, Efficiency, pack
    from zerolm.common.url import is_url
    from zerolm.data.packing import index_file
    from zerolm.shards.reader import open_source

    problems = Problems()
    seq_len = problems.options(PackOptions, options).seq_len
    problems.lines += [
        f"{url}: the index is written next to the shards, which must be on this machine. Copy "
        "them here and pass their path."
        for url in options.shards
        if is_url(str(url))
    ]
    local = [directory for directory in options.shards if not is_url(str(directory))]
    sources = [problems.collect(open_source, directory) for directory in local]
    problems.refuse()
    for source in sources:
        try:
            manifest = pack(source, seq_len)
        except ConfigError as error:
            problems.lines += error.problems
            continue
        print(f"{index_file(source.directory, seq_len)}: {manifest['num_rows']:,} rows")
        print(EFFICIENCY_HEADER)
        for entry in manifest["efficiency"]:
            row = Efficiency(**entry)
            print(row.line(source.num_documents, source.num_tokens, seq_len))
    problems.refuse()
