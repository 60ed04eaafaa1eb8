"""Named errors, exit codes and the wording of refusals. Imports nothing of the project.

A user's mistake is a `ConfigError`: it carries every problem found, is raised once, and ends the
process with exit code 2 before anything was written. An assertion is a bug of ours.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_REFUSED = 2  # nothing was written
EXIT_STOPPED = 75  # saved and stopped on request; EX_TEMPFAIL of sysexits.h: start me again
EXIT_GAVE_UP = 76  # non-finite or diverging; the last good checkpoint is named


class ZerolmError(Exception):
    """Base of every error that is shown to the user as one message, without a traceback."""

    exit_code = EXIT_BUG
    on_all_ranks = True  # raised by every rank in the same place, so they can end together


class CheckpointWriteError(ZerolmError):
    """A checkpoint could not be written. The checkpoints before it are whole."""


class ConfigError(ZerolmError):
    """Input that is refused. One line a problem: `file: key: value, rule, fix`."""

    exit_code = EXIT_REFUSED

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a ConfigError needs at least one problem"
        super().__init__("\n".join(self.problems))


class ShardError(ConfigError):
    """A shard directory that is missing, damaged, or does not fit the model."""


class ShardReadError(ShardError):
    """Token data that could not be read in the middle of a run, by one process of it."""

    exit_code = EXIT_BUG
    on_all_ranks = False


class CheckpointError(ConfigError):
    """A checkpoint that is damaged or does not belong to this run."""


class GaveUp(ZerolmError):
    """Training cannot go on usefully: a non-finite loss, or a divergence beyond the budget."""

    exit_code = EXIT_GAVE_UP


@dataclass
class Findings:
    """What is gathered while input is checked, in the order in which it was found.

    Attributes:
        problems: refuse the run.
        notices: are allowed, but should be known.
    """

    problems: list[str]
    notices: list[str] = field(default_factory=list)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ' Did you mean "x"?' for the nearest choice, or an empty string."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""
