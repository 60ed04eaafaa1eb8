"""`python -m data_prep pack`: what it does and says."""

import argparse

from data_prep.command_line import Problems
from zerolm.errors import ConfigError


def pack_shards(options: argparse.Namespace) -> None:
    """Pack each directory; print how full the rows are beside windows cut from all the text."""
    from data_prep.pack import HEADER, Efficiency, pack
    from zerolm.packing import index_file
    from zerolm.shards import open_source
    from zerolm.url import is_url

    problems = Problems()
    seq_len = problems.number("seq_len", options.seq_len, 1, (1 << 24) - 1)
    problems.lines += [
        f"{place}: an index lies beside its shards, which must be on this machine. Copy them here "
        f"and pack them by their path."
        for place in options.shards
        if is_url(str(place))
    ]
    here = [place for place in options.shards if not is_url(str(place))]
    sources = [problems.of(open_source, directory) for directory in here]
    problems.refuse()
    for source in sources:
        try:
            manifest = pack(source, seq_len)
        except ConfigError as error:
            problems.lines += error.problems
            continue
        print(f"{index_file(source.directory, seq_len)}: {manifest['num_rows']:,} rows")
        print(HEADER)
        for entry in manifest["efficiency"]:
            row = Efficiency(**entry)
            print(row.line(source.num_documents, source.num_tokens, seq_len))
    problems.refuse()
