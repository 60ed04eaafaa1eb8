"""Flags shared by all commands that read documents, and the input rules that they define."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from data_prep.cli.problems import Problems
from data_prep.files.documents import InputRules
from data_prep.files.inputs import Input
from data_prep.pipeline.recipe_options import SourceOptions
from data_prep.stages.options import add_option_flags


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags --input and --text_field, and the flags for handling bad input."""
    add_option_flags(parser, SourceOptions)


def add_output_flag(parser: argparse.ArgumentParser, metavar: str, help: str) -> None:
    parser.add_argument("--output", required=True, type=Path, metavar=metavar, help=help)


def add_workers_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", metavar="N", help="number of worker processes (default: one per core)"
    )


def input_rules(options: argparse.Namespace, problems: Problems) -> InputRules:
    """Return the input rules defined by the flags that `add_input_flags` added."""
    if options.max_bad_fraction is not None and options.on_bad_input != "skip":
        problems.lines.append("--max_bad_fraction: needs --on_bad_input skip.")
    return problems.options(SourceOptions, options).rules(keep_records=False)


def find_inputs(
    options: argparse.Namespace,
    rules: InputRules,
    problems: Problems,
    text_fields: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Input], list[str]]:
    """Resolve --input; return the inputs and notes on them, or empty lists if there are problems.

    Args:
        text_fields: maps values of --input to text fields that differ from --text_field.
    """
    from data_prep.read import discovery

    found = problems.collect(
        discovery.find_inputs,
        options.input,
        rules.text_field,
        rules.on_bad_input == "skip",
        rules.encoding,
        rules.code,
        text_fields,
    )
    return found or ([], [])


def print_notes(notes: Sequence[str]) -> None:
    """Print notes about the inputs to standard error."""
    for note in notes:
        print(note, file=sys.stderr)


def provenance() -> dict[str, Any]:
    """Return the manifest keys that record the command line and the version of zerolm."""
    from zerolm.common.provenance import installed_version
    from zerolm.common.secrets import masked_values

    program = Path(sys.argv[0])
    package = program.parent.name if program.name == "__main__.py" else "data_prep"
    start = ["zerolm"] if program.name == "zerolm" else ["python", "-m", package]
    command = masked_values([*start, *sys.argv[1:]])
    return {"command": command, "zerolm_version": installed_version("zerolm")}
