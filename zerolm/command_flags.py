"""The flags of `python -m zerolm`, command by command. Imports nothing heavy."""

import argparse
from pathlib import Path
from typing import Any

from zerolm.values import parse_number


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser; its `command` is what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m zerolm", description=description)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_model_commands(commands)
    _add_looking_commands(commands)
    _add_store_commands(commands)
    _add_wandb_commands(commands)
    mirror = commands.add_parser("mirror")  # started by a run for itself, so without a help line
    mirror.add_argument("run_dir", type=Path)
    mirror.add_argument("name", choices=("wandb", "tensorboard"))
    mirror.add_argument("--of_process", type=int, required=True)
    return parser


def _add_model_commands(commands: Any) -> None:
    verify = commands.add_parser(
        "verify-checkpoint", help="compare every file of a checkpoint with its manifest"
    )
    verify.add_argument("checkpoint", type=Path, help="runs/first/checkpoints/step-..., or a run")
    export = commands.add_parser("export", help="write a Hugging Face model directory")
    export.add_argument("checkpoint", type=Path, help="runs/first/checkpoints/step-..., or a run")
    export.add_argument("output", type=Path, help="a directory that does not exist yet")
    export.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), help="default: that of the training"
    )
    export.add_argument(
        "--max_shard_size",
        type=size_bytes,
        default=None,
        metavar="SIZE",
        help="of a safetensors file, as 5GB; memory is about that (default: 5GB)",
    )
    export.add_argument("--push", metavar="USER/NAME", help="and send it to the hub, private")
    export.add_argument("--public", action="store_true", help="with --push: for everybody to see")
    evaluate = commands.add_parser("evaluate", help="run HellaSwag and lm-eval's tasks")
    evaluate.add_argument("model", type=Path, help="a directory that zerolm export wrote")
    evaluate.add_argument("--tasks", default="", metavar="NAME[,NAME]", help="tasks of lm-eval")
    evaluate.add_argument("--eval_task_path", metavar="PATH", help="directory with further tasks")
    evaluate.add_argument("--eval_task_items", type=int, metavar="N", help="the first so many each")
    evaluate.add_argument("--hellaswag", metavar="PATH|ID", help="its JSON lines, or a hub id")
    evaluate.add_argument("--hellaswag_items", type=int, default=0, metavar="N", help="0: all")
    evaluate.add_argument("--device", help="of torch (default: a GPU if there is one)")
    evaluate.add_argument("--output", type=Path, help="a JSON file, with each item of HellaSwag")


def _add_looking_commands(commands: Any) -> None:
    decode = commands.add_parser(
        "decode-batch", help="print the text of a batch, with its sources and documents"
    )
    decode.add_argument("run", type=Path, help="runs/first")
    which = decode.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="the batch of this optimizer step")
    which.add_argument(
        "--sequences", metavar="A-B", help="sequence numbers from A up to but without B, or one"
    )
    report = commands.add_parser(
        "report", help="write a page of a run, or of several compared, to open in a browser"
    )
    report.add_argument("runs", nargs="+", type=Path, help="run directories, which may be going on")
    report.add_argument(
        "--output", type=Path, help="the page to write (default: report.html in the first run)"
    )
    report.add_argument("--of_process", type=int, help=argparse.SUPPRESS)
    status = commands.add_parser("status", help="how runs are, from their files alone")
    status.add_argument("runs", nargs="+", type=Path, help="run directories")
    how = status.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="look again every two seconds")
    how.add_argument("--json", action="store_true", help="one JSON object a run and line")
    plot = commands.add_parser("plot", help="draw the loss curves of runs as a PNG")
    plot.add_argument("runs", nargs="+", type=Path, help="run directories")
    plot.add_argument("--output", type=Path, required=True, help="the PNG to write")


def _add_store_commands(commands: Any) -> None:
    upload = commands.add_parser(
        "upload", help="copy the checkpoints of a run to an object store (--upload_to does it too)"
    )
    upload.add_argument("run_dir", type=Path, help="runs/first, which may be going on")
    upload.add_argument("url", help="s3://bucket/first, gs://..., hf://... or file:///...")
    upload.add_argument(
        "--keep", type=int, default=0, metavar="N", help="keep the newest N there (default: all)"
    )
    upload.add_argument("--of_process", type=int, help=argparse.SUPPRESS)
    restore = commands.add_parser("restore", help="fetch a run back from an object store")
    restore.add_argument("url", help="as given to upload or --upload_to")
    restore.add_argument("run_dir", type=Path, help="where to; may exist")
    restore.add_argument("--step", type=int, help="this checkpoint (default: the newest whole one)")


def _add_wandb_commands(commands: Any) -> None:
    sync = commands.add_parser(
        "wandb-sync", help="make a W&B run from a run directory, whatever W&B has got so far"
    )
    sync.add_argument("run_dir", type=Path, help="runs/first, which may be going on")
    sync.add_argument("--project", help="default: that of the run")
    sync.add_argument("--entity", help="user or team (default: that of the run)")
    sync.add_argument("--mode", choices=("auto", "online", "offline"), default="auto")
    sync.add_argument(
        "--same_id", action="store_true", help="overwrite the run's own W&B run, not a new one"
    )
    workspace = commands.add_parser(
        "wandb-workspace", help="make a W&B workspace whose panels suit a run"
    )
    workspace.add_argument("run_dir", type=Path, help="runs/first")
    workspace.add_argument("--project", help="default: that of the run")
    workspace.add_argument("--entity", help="user or team (default: that of the run)")
    workspace.add_argument(
        "--print", action="store_true", help="print its JSON; needs no account and sends nothing"
    )


def size_bytes(text: str) -> int:
    """Read a size as 5GB, 500MB or a number of bytes."""
    number = parse_number(text[:-1] if text[-2:-1].isalpha() and text[-1] in "bB" else text)
    if number < 1 or isinstance(number, float):
        raise ValueError
    return number
