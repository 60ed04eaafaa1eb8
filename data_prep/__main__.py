"""Entry point of `python -m data_prep COMMAND` and `zerolm data COMMAND`.

Lists the commands, from cleaning raw text to inspecting token shards. Each is a module of
`data_prep.cli`, imported when the command runs.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from zerolm.common import interrupts

if __name__ == "__main__":
    interrupts.end_on_interrupt()

from zerolm.common.command_line import EXIT_INTERRUPTED, Group, commands_in, run_program
from zerolm.common.errors import ConfigError, ShardError, ShardReadError, ZerolmError
from zerolm.common.shipped import shield

EXIT_TERMINATED = 128 + signal.SIGTERM
GARBAGE_OBJECTS = 100_000  # created between two collections


class Interrupted(ZerolmError):
    """The user pressed Ctrl-C."""

    exit_code = EXIT_INTERRUPTED


@contextmanager
def _around(argv: Sequence[str]) -> Iterator[None]:
    """Configure this process for a command; report a full disk and Ctrl-C without a traceback."""
    if invalid := [argument for argument in argv if not _is_utf8(argument)]:
        raise ConfigError(
            f"{argument!a}: is not UTF-8, so a manifest cannot contain it. Rename the file, or "
            "pass its parent directory."
            for argument in invalid
        )
    signal.signal(signal.SIGTERM, _terminate)
    # No command multiplies matrices, and a single-threaded process starts its workers faster.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Documents and vocabularies consist of many objects without reference cycles, and every
    # collection would visit all of them.
    gc.set_threshold(GARBAGE_OBJECTS)
    output: Any = _Output(sys.stdout)
    try:
        with redirect_stdout(output):
            yield
            output.flush()
            gc.freeze()  # skips garbage collection at exit
    except (BrokenPipeError, PermissionError):
        raise
    except ShardReadError as error:  # only ranks of a training run use its own exit code
        raise ShardError(error.problems) from None
    except OSError as error:  # such as a full disk or an output that cannot be written
        if error.filename is None and error.errno is None:
            raise
        raise ZerolmError(
            f"{error}. Nothing was published; the same command resumes where this one stopped."
        ) from error
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was published.") from None


class _Output:
    """Standard output; its write errors differ from those of a command's output files."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._call(self._stream.write, text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _call(self, function: Callable, *arguments: str) -> Any:
        try:
            return function(*arguments)
        except BrokenPipeError:  # `| head`
            raise
        except OSError as error:  # discard the buffered output
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise ZerolmError(
                f"cannot write to standard output ({error.strerror}). Output files are not "
                "affected: an output with a manifest.json or stage.json is published and "
                "complete."
            ) from error


def _terminate(*_: object) -> None:
    sys.exit(EXIT_TERMINATED)  # SystemExit stops workers and removes temporary files


def _is_utf8(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:  # Python decodes invalid bytes in arguments to lone surrogates
        return False
    return True


COMMANDS = Group(
    description="Turn raw text into token shards, which pretrain.py reads with --data.",
    topic="prepare data",
    around=_around,
    commands=commands_in(
        "data_prep.cli",
        {
            "documents": {
                "clean": "filter documents",
                "dedup": "drop exact and near-duplicate documents",
                "decontaminate": "drop documents that contain parts of evaluation sets",
            },
            "tokenizers": {
                "train-tokenizer": "train a byte-level BPE tokenizer, and report on it",
                "compare-tokenizers": "compare tokenizers: bytes per token, speed and more",
            },
            "token shards": {
                "tokenize": "encode documents into token shards",
                "pack": "build the index that packs complete documents into sequences",
                "verify": "verify the checksums of token shards",
                "split": "divide the documents of token shards into training and validation parts",
                "convert": (
                    "convert token ids from Megatron, MDS, litdata, Parquet or nanoGPT files "
                    "to token shards"
                ),
                "inspect": "print a training sequence or a document as text",
                "stats": "measure document lengths, token ids and duplicates of token shards",
            },
            "pipelines": {
                "run": "run a recipe: clean, dedup, decontaminate, tokenize, pack",
                "progress": "print the progress of a pipeline's tasks",
            },
        },
    ),
)


def main(argv: Sequence[str]) -> int:
    return run_program(COMMANDS, argv, "python -m data_prep")


if __name__ == "__main__":
    shield(os.environ)
    sys.exit(main(sys.argv[1:]))
