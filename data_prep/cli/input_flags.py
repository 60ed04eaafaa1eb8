"""Flags shared by the commands that read documents, and the input rules that they set."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.cli.problems import Problems
from data_prep.read.documents import InputRules
from data_prep.read.encodings import reading_problems

INPUT_HELP = (
    "a .txt, .md or .html file (one document); .csv or .tsv (one per row); .jsonl or .ndjson (one "
    "per line); these with .gz, .zst, .bz2 or .xz too, also .json.gz; .warc or .wet (one per page; "
    "also .gz); .parquet or .arrow; a directory (all such files in it, sorted by path); a quoted "
    "glob; the URL of one of these (s3://, gs://; https:// for a file); or a dataset of the "
    "Hugging Face hub, namespace/name[:config][@split] (split: train). Several are read in the "
    "order given; the flag may be repeated"
)
DEFAULTS = InputRules()


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add --input, --text_field and the rules for bad input."""
    add = parser.add_argument
    add("--input", required=True, nargs="+", action="extend", help=INPUT_HELP)
    add(
        "--text_field",
        default=DEFAULTS.text_field,
        help="key or column with the text; a.b for a key in a nested object (default: text)",
    )
    add(
        "--code",
        action="store_true",
        help="read every text file of --input as source code: a document with the keys path, "
        "language and license",
    )
    add(
        "--encoding",
        metavar="NAME",
        default=DEFAULTS.encoding,
        help="of text, code, CSV and JSON lines: utf-8, or another one such as cp1252; auto takes "
        "UTF-8 where it is valid, and otherwise detects it. Pages declare their own (default: "
        "utf-8)",
    )
    add(
        "--repair",
        nargs="+",
        metavar="NAME",
        default=[],
        help="repairs of the texts: ftfy (text that was decoded wrongly), entities (&amp; and "
        "others of HTML), nfc (Unicode's composed form); applied in this order",
    )
    add(
        "--max_page_seconds",
        metavar="S",
        help="CPU time to extract the text of a web page; a page that needs more is bad input "
        f"(default: {DEFAULTS.max_page_seconds:g})",
    )
    add(
        "--on_bad_input",
        metavar="fail|skip",
        default=DEFAULTS.on_bad_input,
        help="what to do with documents that cannot be read: fail refuses the input; skip skips, "
        "counts and reports them (default: fail)",
    )
    add(
        "--max_bad_fraction",
        metavar="F",
        help="with --on_bad_input skip: largest fraction of the documents, and of the bytes, that "
        f"may be bad (default: {DEFAULTS.max_bad_fraction})",
    )
    add(
        "--max_document_bytes",
        metavar="BYTES",
        help="longest line, text file, or text of a row; a longer one is bad input (default: "
        f"{DEFAULTS.max_document_bytes >> 20}MiB)",
    )
    add(
        "--max_expansion",
        metavar="N",
        help="largest ratio of decompressed to compressed size of a file, checked beyond 64 MiB of "
        f"decompressed data (default: {DEFAULTS.max_expansion})",
    )


def add_output_flag(parser: argparse.ArgumentParser, metavar: str, help: str) -> None:
    parser.add_argument("--output", required=True, type=Path, metavar=metavar, help=help)


def add_workers_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", metavar="N", help="number of worker processes (default: one per core)"
    )


def input_rules(options: argparse.Namespace, problems: Problems) -> InputRules:
    """Return the rules that the flags of `add_input_flags` set."""
    if options.on_bad_input not in ("fail", "skip"):
        problems.lines.append(f"--on_bad_input {options.on_bad_input}: is not fail or skip.")
    if options.max_bad_fraction is not None and options.on_bad_input != "skip":
        problems.lines.append("--max_bad_fraction: needs --on_bad_input skip.")
    seconds = problems.seconds(
        "max_page_seconds", options.max_page_seconds, DEFAULTS.max_page_seconds
    )
    for flag, problem in reading_problems(options.encoding, options.repair, seconds):
        problems.lines.append(f"--{flag}: {problem}")
    return InputRules(
        text_field=options.text_field,
        on_bad_input=options.on_bad_input,
        max_bad_fraction=problems.fraction(
            "max_bad_fraction", options.max_bad_fraction, DEFAULTS.max_bad_fraction
        ),
        max_document_bytes=problems.size(
            "max_document_bytes",
            options.max_document_bytes,
            1,
            1 << 40,
            default=DEFAULTS.max_document_bytes,
        ),
        max_expansion=problems.number(
            "max_expansion", options.max_expansion, 1, 1 << 40, default=DEFAULTS.max_expansion
        ),
        encoding=options.encoding,
        code=options.code,
        repairs=tuple(options.repair),
        max_page_seconds=seconds,
    )


def find_inputs(options: argparse.Namespace, rules: InputRules, problems: Problems) -> Any:
    """Return (inputs, notes) of --input; None if there are problems."""
    from data_prep.read import discovery

    skip = rules.on_bad_input == "skip"
    return problems.collect(
        discovery.find_inputs,
        options.input,
        rules.text_field,
        skip,
        rules.encoding,
        rules.code,
    )


def print_notes(notes: Sequence[str]) -> None:
    """Print notes about the inputs to standard error."""
    for note in notes:
        print(note, file=sys.stderr)


def provenance() -> dict[str, Any]:
    """Return the manifest keys of the command, as the user typed it, and of the release."""
    from zerolm.common.provenance import installed_version
    from zerolm.common.secrets import masked_values

    program = Path(sys.argv[0])
    package = program.parent.name if program.name == "__main__.py" else "data_prep"
    start = ["zerolm"] if program.name == "zerolm" else ["python", "-m", package]
    command = masked_values([*start, *sys.argv[1:]])
    return {"command": command, "zerolm_version": installed_version("zerolm")}
