"""`evaluate`: loss, HellaSwag, CORE and lm-eval tasks of an exported model."""

import argparse
from pathlib import Path

from zerolm.parts.parse import add_settings, settings_of

EVALUATIONS = (
    *("eval_task_path", "eval_task_items", "hellaswag", "hellaswag_items", "core", "core_items"),
    *("val_data", "seq_len", "eval_tokens", "document_mask", "packing", "loss_by_position"),
    "needle_items",
)
DEFAULTS = {"hellaswag_items": 0, "core_items": 0}
OWN_HELP = {
    "val_data": "token shards: compute loss and bits per byte as eval/... of a run; may be "
    "repeated",
    "seq_len": "tokens per sequence of --val_data; give that of the run to get its figures "
    "(default: 2048, or the positions of the model if fewer)",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="a model directory written by zerolm export")
    add("--tasks", default="", metavar="NAME[,NAME]", help="lm-eval tasks to run")
    add_settings(parser, EVALUATIONS, DEFAULTS, OWN_HELP)
    add("--device", help="torch device (default: a GPU if there is one)")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the results, including those of each item of HellaSwag and CORE, as JSON",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.common.files import write_json
    from zerolm.evaluate.exported_loss import HeldOut
    from zerolm.evaluate.exported_model import evaluate_export

    settings = settings_of(arguments)
    held_out = HeldOut(
        settings.val_data,
        settings.seq_len,
        settings.eval_tokens,
        settings.document_mask,
        settings.packing,
        settings.loss_by_position,
        settings.needle_items,
    )
    results = evaluate_export(
        arguments.model,
        tasks=[name.strip() for name in arguments.tasks.split(",") if name.strip()],
        task_path=settings.eval_task_path,
        task_items=settings.eval_task_items,
        hellaswag_name=settings.hellaswag,
        hellaswag_items=settings.hellaswag_items,
        held_out=held_out if held_out.paths else None,
        core_directory=settings.core,
        core_items=settings.core_items,
        device=arguments.device,
    )
    if arguments.output is not None:
        write_json(arguments.output, results)
