"""Prepare data: `python -m data_prep COMMAND`; data_prep/commands.py has the commands.

Imports next to nothing, since `huge_pages` may start the program again.
"""

import sys
from collections.abc import Sequence

from data_prep.huge_pages import ask_for_huge_pages

ENCODING = ("tokenize", "run")  # commands


def main(argv: Sequence[str]) -> int:
    """Run a command in this process, and return its exit code."""
    from data_prep import commands

    return commands.main(argv)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ENCODING:
        ask_for_huge_pages()
    sys.exit(main(sys.argv[1:]))
