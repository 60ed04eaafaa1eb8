"""`evaluate`: run HellaSwag and lm-eval tasks on an exported model."""

import argparse
from pathlib import Path

from zerolm.common.command_line import count, count_from_zero


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="a model directory written by zerolm export")
    add("--tasks", default="", metavar="NAME[,NAME]", help="lm-eval tasks to run")
    add("--eval_task_path", metavar="DIR", help="directory with additional lm-eval task files")
    add(
        "--eval_task_items",
        type=count,
        metavar="N",
        help="use only the first N documents of each task (default: all)",
    )
    add(
        "--hellaswag",
        metavar="PATH|ID",
        help="run HellaSwag, from a JSON lines file or a Hugging Face dataset",
    )
    add(
        "--hellaswag_items",
        type=count_from_zero,
        default=0,
        metavar="N",
        help="use only the first N items of HellaSwag; 0: all (default: 0)",
    )
    add("--device", help="torch device (default: a GPU if there is one)")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the results, including that of each HellaSwag item, as JSON",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.common.files import write_json
    from zerolm.evaluate.exported_model import evaluate_export

    results = evaluate_export(
        arguments.model,
        tasks=[name.strip() for name in arguments.tasks.split(",") if name.strip()],
        task_path=arguments.eval_task_path,
        task_items=arguments.eval_task_items,
        hellaswag_name=arguments.hellaswag,
        hellaswag_items=arguments.hellaswag_items,
        device=arguments.device,
    )
    if arguments.output is not None:
        write_json(arguments.output, results)
