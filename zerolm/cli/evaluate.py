"""`evaluate`: loss, HellaSwag, CORE and lm-eval tasks of an exported model."""

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
    add(
        "--core",
        metavar="DIR",
        help="run CORE, the 22 tasks of DCLM; directory of the unpacked eval_bundle",
    )
    add(
        "--core_items",
        type=count_from_zero,
        default=0,
        metavar="N",
        help="use only N items of each task of CORE; 0: all (default: 0)",
    )
    add(
        "--val_data",
        action="append",
        default=[],
        metavar="PATH",
        help="token shards: compute loss and bits per byte as eval/... of a run; may be repeated",
    )
    add(
        "--seq_len",
        type=count,
        metavar="TOKENS",
        help="sequence length for --val_data; give that of the run to get its figures (default: "
        "2048, or the positions of the model if fewer)",
    )
    add(
        "--eval_tokens",
        type=count,
        metavar="TOKENS",
        help="tokens of --val_data to use (default: 1M, or all if fewer)",
    )
    add(
        "--document_mask",
        action="store_true",
        help="for --val_data: let tokens attend only to tokens of their own document",
    )
    add(
        "--packing",
        choices=("concat", "best_fit"),
        default="concat",
        help="for --val_data: how documents form sequences (default: concat)",
    )
    add(
        "--loss_by_position",
        action="store_true",
        help="for --val_data: also the loss of the first, middle and last quarter of a sequence",
    )
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

    held_out = HeldOut(
        arguments.val_data,
        arguments.seq_len,
        arguments.eval_tokens,
        arguments.document_mask,
        arguments.packing,
        arguments.loss_by_position,
    )
    results = evaluate_export(
        arguments.model,
        tasks=[name.strip() for name in arguments.tasks.split(",") if name.strip()],
        task_path=arguments.eval_task_path,
        task_items=arguments.eval_task_items,
        hellaswag_name=arguments.hellaswag,
        hellaswag_items=arguments.hellaswag_items,
        held_out=held_out if held_out.paths else None,
        core_directory=arguments.core,
        core_items=arguments.core_items,
        device=arguments.device,
    )
    if arguments.output is not None:
        write_json(arguments.output, results)
