"""The command line of `python -m data_prep`: its flags, their help, and checks of numbers."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_prep.flags_dedup import add_dedup
from data_prep.input_flags import add_input_flags
from data_prep.tokenizer_flags import add_compare_tokenizers, add_train_tokenizer
from zerolm.errors import ConfigError, did_you_mean
from zerolm.url import place


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose flags have underscores or dashes.

    Raises:
        ConfigError: flags that do not exist, and words that are not UTF-8.
    """
    words = list(argv)
    if odd := [word for word in words if not _is_utf8(word)]:
        raise ConfigError(
            f"{word!a}: is not UTF-8, and no manifest could name it. Rename the file, or give "
            f"the directory above it."
            for word in odd
        )
    for number, word in enumerate(words):
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            words[number] = "--" + flag.replace("-", "_") + equals + value
    options, unknown = parser().parse_known_args(words)
    if unknown:
        flags = [f"--{name}" for name in vars(options) if name not in ("command", "shards")]
        raise ConfigError(
            f"{options.command}: {word} is not a flag of it.{did_you_mean(word, flags)} "
            f"See python -m data_prep {options.command} --help."
            for word in unknown
        )
    return options


def _is_utf8(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:  # Python has other bytes as lone surrogates
        return False
    return True


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep",
        description="Raw text -> tokenizer -> token shards, which pretrain.py reads with --data.",
        epilog="Flags may be written with underscores or dashes.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_train_tokenizer(
        _add(commands, "train-tokenizer", "train a byte-level BPE tokenizer, and report on it")
    )
    add_compare_tokenizers(
        _add(commands, "compare-tokenizers", "bytes per token and more of several tokenizers")
    )
    _add_tokenize(commands)
    verify = _add(commands, "verify", "compare every file of token shards with its checksum")
    verify.add_argument("shards", nargs="+", type=place, metavar="SHARDS", help="shard directories")
    _add_inspect(commands)
    _add_stats(commands)
    _add_pack(commands)
    add_dedup(commands, _add)
    _add_run(commands)
    return parser


def _add(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, description=what, allow_abbrev=False)


def _add_inspect(commands: Any) -> None:
    inspect = _add(commands, "inspect", "show what a model is trained on, as text")
    flags = inspect.add_argument
    flags("shards", nargs="?", type=place, metavar="SHARDS", help="a shard directory or URL; or")
    flags("--run", type=Path, metavar="RUN", help="the directory of a run, whose data is shown")
    flags("--sequence", metavar="N", help="number of the window, or of the run's sequence, from 0")
    flags("--seq_len", metavar="T", help="with SHARDS: tokens of a sequence")
    flags("--seed", metavar="S", help="N is a sequence of a run with this seed on these SHARDS")
    flags(
        "--packing",
        choices=("concat", "best_fit"),
        default="concat",
        help="with SHARDS: how its rows are packed (default: concat)",
    )
    flags("--document", metavar="N", help="with SHARDS: a whole document, numbered from 0")
    flags("--step", metavar="K", help="with --run: the batch of this step, from 1")
    flags("--row", metavar="R", help="with --step: one row of it, from 0")
    flags("--json", action="store_true", help="a JSON object a line")


def _add_stats(commands: Any) -> None:
    stats = _add(commands, "stats", "measure lengths, ids and duplicates of token shards")
    flags = stats.add_argument
    flags("shards", nargs="+", type=Path, metavar="SHARDS", help="shard directories")
    flags("--output", type=Path, metavar="FILE", help="a page (.html) or a picture (.png)")
    flags("--json", type=Path, metavar="FILE", help="the figures")
    flags("--top", metavar="N", help="most frequent ids to name (default: 50)")
    flags("--workers", metavar="N", help="processes that measure (default: one a core)")


def _add_tokenize(commands: Any) -> None:
    tokenize = _add(commands, "tokenize", "encode documents into token shards")
    add_input_flags(tokenize)
    tokenize.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="a Hugging Face tokenizer directory or hub id, or tiktoken:<encoding>",
    )
    tokenize.add_argument(
        "--output", required=True, type=Path, metavar="SHARDS", help="a new directory"
    )
    tokenize.add_argument(
        "--workers", metavar="N", help="processes that encode (default: one a core)"
    )
    tokenize.add_argument(
        "--val_fraction",
        metavar="F",
        help="part of the documents to hold out, chosen by a hash of the text",
    )
    tokenize.add_argument(
        "--val_output", type=Path, metavar="SHARDS", help="where the held-out documents go"
    )
    tokenize.add_argument(
        "--shard_tokens", metavar="N", help="largest shard, in tokens (default: 134217728)"
    )
    tokenize.add_argument(
        "--encoder",
        default="auto",
        metavar="NAME",
        help="gigatoken, fastokens, tiktoken, tokenizers or transformers (default: auto, the "
        "fastest that is proven to give the same ids)",
    )


def _add_pack(commands: Any) -> None:
    what = "index which whole documents share a training row, for --packing best_fit"
    pack = _add(commands, "pack", what)
    pack.add_argument("shards", nargs="+", type=place, metavar="SHARDS", help="shard directories")
    pack.add_argument("--seq_len", required=True, metavar="T", help="tokens of a sequence")


def _add_run(commands: Any) -> None:
    run = _add(commands, "run", "run a recipe: clean, dedup, decontaminate, tokenize")
    run.add_argument("recipe", type=Path, metavar="RECIPE", help="a JSON file")
    run.add_argument(
        "--executor", default="local", metavar="local|slurm|ray", help="where tasks run"
    )
    run.add_argument("--workers", metavar="N", help="tasks at a time (default: one a core)")
    run.add_argument("--check", action="store_true", help="show the plan, and write nothing")
    progress = _add(commands, "progress", "show how far the tasks of a pipeline are")
    progress.add_argument("directory", type=Path, metavar="DIR", help="the output of a recipe")
    clean = _add(commands, "clean", "filter documents into a stage")
    add_input_flags(clean)
    clean.add_argument("--output", required=True, type=Path, metavar="DIR", help="the stage")
    clean.add_argument(
        "--filters",
        required=True,
        type=Path,
        metavar="JSON",
        help="a list of filters, as in a recipe, or a recipe",
    )
    clean.add_argument("--workers", metavar="N", help="processes (default: one a core)")
    clean.add_argument("--keep_dropped", type=Path, metavar="DIR", help="write what is dropped")


class Problems:
    """Every problem of a command line, to be raised together."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def number(
        self, flag: str, text: str | None, low: int, high: float = math.inf, default: int = 0
    ) -> int:
        """Return a whole number, which may be written like 1e8."""
        if text is None:
            return default
        try:
            value = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and value == int(value)):
            limits = f"from {low:,}" + (f" to {high:,}" if high < math.inf else " up")
            self.lines.append(f"--{flag} {text}: is not a whole number {limits}.")
            return low
        return int(value)

    def of(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a step returns, or collect its problems and return None."""
        try:
            return step(*arguments)
        except ConfigError as error:
            self.lines += error.problems
            return None

    def refuse(self) -> None:
        """Raise what was collected, if anything was."""
        if self.lines:
            raise ConfigError(self.lines)
