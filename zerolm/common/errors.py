"""The project's exceptions and exit codes.

A user's mistake raises one `ConfigError`, which lists every problem and ends the process with exit
code 2 before anything is written. A failed assertion is a bug in zerolm.
"""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerolm.common.secrets import masked
from zerolm.common.values import printable

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_REFUSED = 2  # nothing was written
EXIT_STOPPED = 75  # saved and stopped on request; start the run again. EX_TEMPFAIL in sysexits.h
EXIT_GAVE_UP = 76  # the loss is not finite, or diverges
EXIT_CORRUPT = 77  # a device computed or stored wrong values; start again without its host

MAX_REASON_CHARACTERS = 300
MAX_PROBLEM_CHARACTERS = 1800  # for a value, or a key in a file; the middle of a longer one is cut


class ZerolmError(Exception):
    """Base class of errors that are shown to the user as a message, without a traceback.

    Attributes:
        on_all_ranks: whether every rank raises the error at the same point, so all ranks can exit
            together.
    """

    exit_code = EXIT_BUG
    on_all_ranks = True

    def __init__(self, message: str = ""):
        super().__init__(printable(masked(message), "\n\t"))


class CheckpointWriteError(ZerolmError):
    """A checkpoint could not be written. Earlier checkpoints are complete."""


class ConfigError(ZerolmError):
    """The input is refused. Each problem is one line: `file: key: value, rule, fix`."""

    exit_code = EXIT_REFUSED

    def __init__(self, problems: str | Iterable[str]):
        given = [problems] if isinstance(problems, str) else problems
        self.problems = [_shortened(printable(masked(problem), "\n\t")) for problem in given]
        assert self.problems, "a ConfigError needs at least one problem"
        super().__init__("\n".join(self.problems))


def _shortened(problem: str) -> str:
    if len(problem) <= MAX_PROBLEM_CHARACTERS:
        return problem
    half = MAX_PROBLEM_CHARACTERS // 2
    return f"{problem[:half]} ... {problem[-half:]}"  # the end contains the fix


class RecordError(ConfigError):
    """A file written by one of our programs is damaged. The message is one line."""


class ShardError(ConfigError):
    """A shard directory is missing, damaged, or does not fit the model."""


class ShardReadError(ShardError):
    """A process of the run cannot read token data."""

    exit_code = EXIT_BUG
    on_all_ranks = False


class CheckpointError(ConfigError):
    """A checkpoint is damaged or does not belong to this run."""


class GaveUp(ZerolmError):
    """Training cannot continue, because the loss is not finite or there were too many spikes."""

    exit_code = EXIT_GAVE_UP


class CorruptionError(ZerolmError):
    """Hardware silently changed values, and the run cannot correct them.

    Attributes:
        places: rank, host and device of each fault.
    """

    exit_code = EXIT_CORRUPT

    def __init__(self, message: str, places: Sequence[Mapping[str, Any]] = ()):
        super().__init__(message)
        self.places = [dict(place) for place in places]


def reason(
    error: BaseException | str,
    *,
    named: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return an error as one line of at most `MAX_REASON_CHARACTERS`, without credentials.

    Secrets are masked before the text is shortened, because a truncated secret would not be
    recognised.

    Args:
        named: whether to begin with the exception's type; the type is always shown if there is no
            message.
        environment: environment variables; the values of secret ones are hidden.
    """
    text = str(error)
    if isinstance(error, BaseException) and (named or not text.strip()):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    line = " ".join(masked(text, environment).split())
    return line if len(line) <= MAX_REASON_CHARACTERS else line[: MAX_REASON_CHARACTERS - 3] + "..."


@dataclass
class Findings:
    """Problems and notices from checking the input, each in the order in which it was found.

    Attributes:
        problems: reasons to refuse the run.
        notices: lines that are printed without refusing the run.
    """

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def add(self, others: "Findings") -> None:
        """Append what was found elsewhere."""
        self.problems += others.problems
        self.notices += others.notices


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ' Did you mean "x"?' for the most similar choice, or an empty string.

    A flag must be more similar than other words, since a suggested flag with another meaning would
    mislead.
    """
    is_flag = word.startswith("--")
    by_word = {choice.removeprefix("--"): choice for choice in choices}
    cutoff = 0.75 if is_flag else 0.6
    near = difflib.get_close_matches(word.removeprefix("--"), list(by_word), n=1, cutoff=cutoff)
    return f' Did you mean "{by_word[near[0]]}"?' if near else ""


def unknown_keys(where: str, given: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return one problem for each given key that is not a known option."""
    known = list(known)
    return [
        f"{where}.{key}: is not an option.{did_you_mean(key, known)} Known: {', '.join(known)}."
        for key in given
        if key not in known
    ]
