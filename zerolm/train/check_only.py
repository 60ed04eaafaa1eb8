"""`--check` in a process that is no rank, as `zerolm train --check` starts it.

Most of what a rank imports is for training, which this module must not import.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from zerolm.common import remembered
from zerolm.common.command_line import open_standard_streams, refuse_line_breaks
from zerolm.common.errors import EXIT_DONE, ConfigError
from zerolm.common.secrets import mask_tracebacks
from zerolm.distributed import collectives, process_group
from zerolm.plan.duration import with_duration
from zerolm.preflight import check
from zerolm.watchdog import limits

OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MAY_NEGATE = ("--no_check", "--no-check", "--check=")


def is_wanted(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command line asks for nothing but the checks of a process that is no rank.

    The answer is also no where the flag is written twice, in different forms.
    """
    is_rank = any(name in environment for name in OF_RANKS)
    return "--check" in argv and not is_rank and not any(w.startswith(MAY_NEGATE) for w in argv)


def end(argv: Sequence[str]) -> NoReturn:
    """End this process as `main` says."""
    process_group.exit_process(main(argv))


def main(argv: Sequence[str]) -> int:
    """Check a command line, print its plan or every problem, and return the exit code."""
    open_standard_streams()
    mask_tracebacks()
    limits.raise_file_limit()
    try:
        refuse_line_breaks(argv)
        with remembered.opened():
            plan = with_duration(check.check(argv))
    except (ConfigError, OSError) as error:
        return process_group.report_config_error(limits.refusal(error), 0, 0)
    collectives.print_safely(plan.summary())
    return EXIT_DONE
