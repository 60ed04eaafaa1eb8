"""`upload`: copy the checkpoints and logs of a run to an object store."""

import argparse
from pathlib import Path

from zerolm.common.command_line import count, count_from_zero
from zerolm.common.errors import EXIT_BUG, EXIT_DONE, ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, help="a run directory; the run may be in progress")
    add("url", help="directory in a store: s3://bucket/first, gs://..., hf://... or file:///...")
    add(
        "--keep",
        type=count_from_zero,
        default=0,
        metavar="N",
        help="keep only the newest N checkpoints in the store; 0: all (default: 0)",
    )
    # The process number of the run that started this command.
    add("--of_process", type=count, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from zerolm.common import child
    from zerolm.common.store import StoreError
    from zerolm.upload import uploader

    refuse_bad_url(arguments.url)
    if arguments.of_process is not None:
        child.serve(arguments.of_process)
    try:
        sent = uploader.upload(arguments.run_dir, arguments.url, arguments.keep)
    except StoreError:  # the uploader has printed the error
        return EXIT_BUG
    if not sent and arguments.of_process is None:
        print(f"{arguments.url}: already contains every checkpoint of {arguments.run_dir}")
    return EXIT_DONE


def refuse_bad_url(url: str) -> None:
    """Raise a ConfigError if `url` does not name a directory in a store."""
    from zerolm.upload.rules import url_problem

    problem = url_problem(url)
    if problem:
        raise ConfigError(f"{url}: {problem}")
