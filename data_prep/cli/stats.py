"""`stats`: measure document lengths, token ids and duplicates of token shards."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.cli.input_flags import add_workers_flag
from data_prep.cli.problems import Problems


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("shards", nargs="+", type=Path, metavar="SHARDS", help="shard directories")
    add("--json", type=Path, metavar="FILE", help="write the statistics as JSON")
    add("--top", metavar="N", help="how many of the most frequent ids to list (default: 50)")
    add_workers_flag(parser)


def run(options: argparse.Namespace) -> None:
    from data_prep.finished_shards import stats as measure
    from data_prep.tasks.progress import Progress
    from zerolm.common.files import write_json
    from zerolm.shards.reader import open_source

    problems = Problems()
    workers = problems.workers(options.workers)
    top = problems.number("top", options.top, 1, 100_000, default=50)
    sources = [problems.collect(open_source, directory) for directory in options.shards]
    problems.file_to_write("json", options.json)
    problems.refuse()
    progress = Progress("stats", sum(source.num_tokens for source in sources))
    try:
        found = measure.measure_shards(sources, workers, top, progress)
    finally:
        progress.close()
    for line in text_lines(found):
        print(line)
    if options.json is not None:
        write_json(options.json, {"sources": found})
        print(f"figures: {options.json}")


def text_lines(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines to print for the statistics that `measure_shards` returns."""
    for source in sources:
        length, ids, duplicates = source["length"], source["ids"], source["duplicates"]
        quantiles = ", ".join(
            f"{float(share):.0%} {tokens:,}" for share, tokens in length["quantiles"].items()
        )
        yield f"{source['shards']}:"
        yield (
            f"    documents      {source['num_documents']:,}, {source['num_tokens']:,} tokens"
            + (f", {source['bytes_per_token']:.3f} bytes per token" if source["bytes_per_token"]
               else "")
        )  # fmt: skip
        yield (
            f"    length         mean {length['mean']:,.1f}, {length['shortest']:,} to "
            f"{length['longest']:,} tokens (document {length['longest_document']})"
        )
        yield f"    quantiles      {quantiles}"
        for limit in length["longer_than"]:
            if limit["documents"]:
                yield (
                    f"    above {limit['tokens']:<8,} {limit['documents']:,} documents "
                    f"({limit['documents'] / source['num_documents']:.2%}), "
                    f"{limit['of_tokens'] / source['num_tokens']:.2%} of the tokens"
                )
        yield (
            f"    ids            {ids['unused']:,} of {ids['vocab_size']:,} unused; "
            f"{ids['half_of_tokens']:,} ids make up half of the tokens"
        )
        if ids["eos_inside_documents"]:
            yield f"    EOS            {ids['eos_inside_documents']:,} inside documents"
        yield (
            f"    duplicates     {duplicates['again']:,} documents ({duplicates['share']:.2%}) "
            f"are copies of another document, in {duplicates['groups']:,} groups"
        )
        for repeat in duplicates["most_repeated"][:3]:
            yield f"                   {repeat['times']:,} times: document {repeat['document']}"
