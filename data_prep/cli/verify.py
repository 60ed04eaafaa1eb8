"""`verify`: compare every file of token shards, and of their packing indices, with its checksum."""

import argparse
import sys
from typing import Any

from data_prep.cli.problems import Problems
from zerolm.common.errors import ConfigError
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
                f"note: {directory}: manifest.json was written by an older release, without a "
                f"digest: only values that can be recounted from the tokens are checked",
                file=sys.stderr,
            )
            for note in _tokenizer_notes(reader.open_source(directory)):
                print(f"note: {directory}: {note}", file=sys.stderr)
        if manifest is not None and not damaged:
            print(
                f"{directory}: complete. {manifest['num_documents']:,} documents, "
                f"{manifest['num_tokens']:,} tokens, {len(manifest['shards'])} shards"
            )
    problems.refuse()


def _tokenizer_notes(source: Any) -> list[str]:
    """Return how a manifest differs from what the copy of its tokenizer says today.

    These are no refusals: another release of the library may describe a tokenizer otherwise.
    """
    from data_prep.tokenizer.load import load_tokenizer

    try:
        tokenizer = load_tokenizer(str(source.tokenizer_directory()))
    except ConfigError:  # no copy, or a package is missing
        return []
    stated, notes = source.head["tokenizer"]["fingerprint"], []
    if stated != tokenizer.fingerprint:
        notes.append(
            f"tokenizer.fingerprint: {stated}, but that of tokenizer/ is {tokenizer.fingerprint}"
        )
    if source.vocab_size != tokenizer.vocab_size:
        notes.append(
            f"vocab_size: {source.vocab_size}, but tokenizer/ has {tokenizer.vocab_size} ids"
        )
    return notes
