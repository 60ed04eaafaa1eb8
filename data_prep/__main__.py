"""Prepare data: `python -m data_prep train-tokenizer | tokenize | verify | inspect | stats`."""

import os
import signal
import sys
from collections.abc import Sequence

from data_prep import commands_look
from data_prep.command_line import parse
from data_prep.commands_clean import clean, progress
from data_prep.commands_dedup import decontaminate, dedup
from data_prep.commands_pack import pack_shards
from data_prep.commands_run import run
from data_prep.commands_tokenize import tokenize, verify
from data_prep.commands_tokenizer import compare_tokenizers, train_tokenizer
from zerolm.errors import EXIT_BUG, EXIT_DONE, ZerolmError

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


COMMANDS = {
    "train-tokenizer": train_tokenizer,
    "compare-tokenizers": compare_tokenizers,
    "tokenize": tokenize,
    "verify": verify,
    "inspect": commands_look.inspect,
    "stats": commands_look.stats,
    "pack": pack_shards,
    "dedup": dedup,
    "decontaminate": decontaminate,
    "run": run,
    "progress": progress,
    "clean": clean,
}


def _terminate(*_: object) -> None:
    sys.exit(EXIT_TERMINATED)  # an exception, so that workers are stopped and files removed


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _terminate)
    # Nothing here multiplies matrices, and a process of one thread starts its workers sooner.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        options = parse(argv)
        COMMANDS[options.command](options)
    except ZerolmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, an output that cannot be written
        if error.filename is None and error.errno is None:
            raise
        print(f"{error}. Nothing was published; the same command again goes on.", file=sys.stderr)
        return EXIT_BUG
    except KeyboardInterrupt:
        print("Interrupted; nothing was published.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
