"""Tables for the commands: flags, rows, and figures with quartiles."""

import argparse
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import quantiles


def parser(documentation: str, has_table: bool = True) -> argparse.ArgumentParser:
    """Return a parser with a module's docstring as its help, and `--output` for the tables."""
    made = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if has_table:
        made.add_argument("--output", type=Path, help="also write the tables to this Markdown file")
    return made


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def show(paragraphs: Sequence[str], machine: str, output: Path | None) -> None:
    """Print the command, date, machine and tables; also write them to a file if given."""
    command = f"`python {shlex.join(sys.orig_argv[1:])}`, {time.strftime('%Y-%m-%d')}, {machine}"
    text = "\n\n".join([command, *paragraphs]) + "\n"
    print("\n" + text)
    if output:
        output.write_text(text)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median with its quartiles."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = (
        f"{value:.{digits}f}" for value in quantiles(values, n=4, method="inclusive")
    )
    return f"{middle} ({low} to {high})"
