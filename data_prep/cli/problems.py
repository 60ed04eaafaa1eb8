"""`Problems`: collects every problem with a command's flags and files, to raise them together."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from data_prep.stages.options import options_of_flags
from zerolm.common.errors import ConfigError
from zerolm.common.files import write_problem
from zerolm.common.url import is_url
from zerolm.common.values import parse_bytes, parse_number

MAX_WORKERS = 4096

Options = TypeVar("Options")


class Problems:
    """The problems found so far, one line each. An omitted flag (None) takes its default."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def options(self, options_class: type[Options], given: argparse.Namespace) -> Options:
        """Return the values of the flags that `add_option_flags` added to a command."""
        options, problems = options_of_flags(options_class, given)
        self.lines += problems
        return options

    def number(
        self, flag: str, text: str | None, low: int, high: float = math.inf, default: int = 0
    ) -> int:
        """Parse a whole number, such as `1e8` or `15M`, and check it against the limits."""
        return self._whole(parse_number, flag, text, low, high, default)

    def size(
        self, flag: str, text: str | None, low: int, high: float = math.inf, default: int = 0
    ) -> int:
        """Parse a number of bytes, such as `500MB` or `2GiB`, and check it against the limits."""
        return self._whole(parse_bytes, flag, text, low, high, default)

    def workers(self, text: str | None, high: int = MAX_WORKERS) -> int:
        """Parse --workers; the default is one worker per core that this process may use."""
        return self.number("workers", text, 1, high, default=len(os.sched_getaffinity(0)))

    def fraction(
        self, flag: str, text: str | None, default: float, exclusive: bool = False
    ) -> float:
        """Parse a number from 0 to 1; with `exclusive`, 0 and 1 are not allowed."""
        value = default if text is None else _value(parse_number, text)
        if not 0 <= value <= 1 or (exclusive and value in (0, 1)):
            limits = "between 0 and 1" if exclusive else "from 0 to 1"
            self.lines.append(f"--{flag} {text}: is not a number {limits}.")
            return default
        return value

    def shard_output(self, directory: Path, flag: str = "output") -> None:
        """Check that a directory can be created for token shards."""
        from zerolm.shards.directory import output_problems

        self.lines += [f"--{flag} {line}" for line in output_problems(directory)]

    def outside_of_inputs(self, output: Path, inputs: Sequence[Any]) -> None:
        """Check that an output is neither an input nor inside an input; ignore inputs that are
        URLs.
        """
        target = output.resolve()
        self.lines += [
            f"--output {output}: is the input {path}, or inside it. Choose another directory."
            for path in inputs
            if not is_url(str(path)) and path.resolve() in (target, *target.parents)
        ]

    def collect(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function; return its result, or None after recording the problems of a
        ConfigError.
        """
        try:
            return step(*arguments)
        except ConfigError as error:
            self.lines += error.problems
            return None

    def file_to_write(self, flag: str, path: Path | None) -> None:
        """Check that a file can be written later; do nothing if the path is None."""
        if path is not None and (problem := write_problem(path)):
            self.lines.append(f"--{flag} {problem}")

    def refuse(self) -> None:
        """Raise a ConfigError with all problems, if there are any."""
        if self.lines:
            raise ConfigError(self.lines)

    def _whole(
        self,
        parse: Callable[[str], float],
        flag: str,
        text: str | None,
        low: int,
        high: float,
        default: int,
    ) -> int:
        if text is None:
            return default
        value = _value(parse, text)
        if not (low <= value <= high and value == int(value)):
            limits = f"from {low:,}" + (f" to {high:,}" if high < math.inf else " up")
            self.lines.append(f"--{flag} {text}: is not a whole number {limits}.")
            return low
        return int(value)


def _value(parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except ValueError:
        return math.nan
