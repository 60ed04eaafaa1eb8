"""`evaluate`: compute the loss and downstream scores of an exported model."""

import argparse
from pathlib import Path

from zerolm.common.command_line import file_to_write
from zerolm.evaluate import EVALUATIONS
from zerolm.parts.parse import add_settings, settings_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="a model directory written by zerolm export")
    for each in (flag for kind in EVALUATIONS for flag in kind.EXPORT):
        add_settings(
            parser,
            [each.setting],
            {each.setting: each.default},
            {each.setting: each.help} if each.help else {},
            {each.setting: each.flag},
        )
    add("--device", help="torch device (default: a GPU if there is one)")
    add(
        "--output",
        type=file_to_write,
        metavar="FILE",
        help="also write the results as JSON, with the outcome of each item",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.common.files import write_json
    from zerolm.evaluate.exported_model import evaluate_export

    results = evaluate_export(arguments.model, settings_of(arguments), device=arguments.device)
    if arguments.output is not None:
        write_json(arguments.output, results)
