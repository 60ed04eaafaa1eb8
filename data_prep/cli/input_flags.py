"""The flags of every command that reads documents: which, and what is done about bad ones."""

import argparse
import math
from typing import Any

from data_prep.documents import InputRules

INPUT_HELP = (
    "a .txt file (one document), .jsonl (also .gz, .zst), .json.gz or .json.zst of lines, or "
    ".parquet, a directory of them (all below it, sorted by path), a quoted glob, or a hub id "
    "namespace/name[:config][@split] (split: train); several and repeated, read in the order given"
)
DEFAULTS = InputRules()


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add --input, --text_field and the rules for bad input."""
    parser.add_argument("--input", required=True, nargs="+", action="extend", help=INPUT_HELP)
    parser.add_argument(
        "--text_field",
        default=DEFAULTS.text_field,
        help="key or column; a.b is the key b in the object a (default: text)",
    )
    parser.add_argument(
        "--on_bad_input",
        metavar="fail|skip",
        default=DEFAULTS.on_bad_input,
        help="refuse everything, or leave out, count and report what cannot be read (default: "
        "fail)",
    )
    parser.add_argument(
        "--max_bad_fraction",
        metavar="F",
        help="part of the documents, and of the bytes, that may be bad with --on_bad_input skip "
        f"(default: {DEFAULTS.max_bad_fraction})",
    )
    parser.add_argument(
        "--max_document_bytes",
        metavar="N",
        help="longest line, text file, or text of a row; longer ones are bad input (default: "
        f"{DEFAULTS.max_document_bytes})",
    )
    parser.add_argument(
        "--max_expansion",
        metavar="N",
        help="how many times its size a compressed file may become, beyond 64 MiB (default: "
        f"{DEFAULTS.max_expansion})",
    )


def input_rules(options: argparse.Namespace, problems: Any) -> InputRules:
    """Return what the flags of `add_input_flags` say; wrong ones go to a command_line.Problems."""
    fraction = DEFAULTS.max_bad_fraction
    if options.on_bad_input not in ("fail", "skip"):
        problems.lines.append(f"--on_bad_input {options.on_bad_input}: is not fail or skip.")
    if options.max_bad_fraction is not None:
        try:
            fraction = float(options.max_bad_fraction)
        except ValueError:
            fraction = math.nan
        if not 0 <= fraction <= 1:
            problems.lines.append(
                f"--max_bad_fraction {options.max_bad_fraction}: is not a number from 0 to 1."
            )
        if options.on_bad_input != "skip":
            problems.lines.append("--max_bad_fraction: needs --on_bad_input skip.")
    return InputRules(
        text_field=options.text_field,
        on_bad_input=options.on_bad_input,
        max_bad_fraction=fraction,
        max_document_bytes=problems.number(
            "max_document_bytes",
            options.max_document_bytes,
            1,
            1 << 40,
            default=DEFAULTS.max_document_bytes,
        ),
        max_expansion=problems.number(
            "max_expansion", options.max_expansion, 1, 1 << 40, default=DEFAULTS.max_expansion
        ),
    )
