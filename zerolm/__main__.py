"""What comes after a run: export it, evaluate, report, look at it, copy it, fetch it back."""

import argparse
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from zerolm import processes
from zerolm.checkpoint_directory import Checkpoint, newest, problems_of, read
from zerolm.errors import EXIT_BUG, EXIT_DONE, CheckpointError, ConfigError, ZerolmError
from zerolm.values import parse_number


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zerolm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
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
    upload = commands.add_parser(
        "upload", help="copy the checkpoints of a run to an object store (--upload_to does it too)"
    )
    upload.add_argument("run_dir", type=Path, help="runs/first, which may be going on")
    upload.add_argument("url", help="s3://bucket/first, gs://..., hf://... or file:///...")
    upload.add_argument(
        "--keep", type=int, default=0, metavar="N", help="keep the newest N there (default: all)"
    )
    upload.add_argument("--of_process", type=int, help=argparse.SUPPRESS)
    evaluate = commands.add_parser("evaluate", help="run HellaSwag and lm-eval's tasks")
    evaluate.add_argument("model", type=Path, help="a directory that zerolm export wrote")
    evaluate.add_argument("--tasks", default="", metavar="NAME[,NAME]", help="tasks of lm-eval")
    evaluate.add_argument("--eval_task_path", metavar="PATH", help="directory with further tasks")
    evaluate.add_argument("--eval_task_items", type=int, metavar="N", help="the first so many each")
    evaluate.add_argument("--hellaswag", metavar="PATH|ID", help="its JSON lines, or a hub id")
    evaluate.add_argument("--hellaswag_items", type=int, default=0, metavar="N", help="0: all")
    evaluate.add_argument("--device", help="of torch (default: a GPU if there is one)")
    evaluate.add_argument("--output", type=Path, help="a JSON file, with each item of HellaSwag")
    restore = commands.add_parser("restore", help="fetch a run back from an object store")
    restore.add_argument("url", help="as given to upload or --upload_to")
    restore.add_argument("run_dir", type=Path, help="where to; may exist")
    restore.add_argument("--step", type=int, help="this checkpoint (default: the newest whole one)")
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
    mirror = commands.add_parser("mirror")  # started by a run for itself, so without a help line
    mirror.add_argument("run_dir", type=Path)
    mirror.add_argument("name", choices=("wandb", "tensorboard"))
    mirror.add_argument("--of_process", type=int, required=True)
    return parser


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "plot":
            from zerolm.plot import plot_losses

            plot_losses(arguments.runs, arguments.output)
            print(arguments.output)
            return EXIT_DONE
        if arguments.command == "report":
            from zerolm.report import write_report

            if arguments.of_process is not None:
                processes.serve(arguments.of_process)
            page = write_report(arguments.runs, arguments.output)
            if arguments.of_process is None:
                print(page)
            return EXIT_DONE
        if arguments.command == "status":
            from zerolm.status import show

            show(arguments.runs, watch=arguments.watch, as_json=arguments.json)
            return EXIT_DONE
        if arguments.command == "evaluate":
            return evaluate(arguments)
        if arguments.command == "mirror":
            from zerolm.mirror import mirror

            mirror(arguments.run_dir, arguments.name, arguments.of_process)
        if arguments.command == "wandb-sync":
            from zerolm.wandb_sync import wandb_sync

            given = {key: getattr(arguments, key) for key in ("mode", "project", "entity")}
            wandb_sync(arguments.run_dir, same_id=arguments.same_id, **given)
            return EXIT_DONE
        if arguments.command == "wandb-workspace":
            from zerolm.wandb_workspace import make

            print(make(arguments.run_dir, arguments.project, arguments.entity, arguments.print))
            return EXIT_DONE
        if arguments.command == "upload":
            return upload(arguments)
        if arguments.command == "restore":
            return restore(arguments)
        if arguments.command == "decode-batch":
            from zerolm.batches import decode_batch

            lines = decode_batch(arguments.run, arguments.step, arguments.sequences)
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
            try:
                for line in lines:
                    print(line)
                sys.stdout.flush()
            except BrokenPipeError:  # `| head` has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_DONE
        found = whole_checkpoint(arguments.checkpoint)
        progress = found.progress
        print(
            f"{found.directory}: whole, {len(found.manifest['files'])} files, step "
            f"{progress.step:,}, {progress.tokens:,} tokens"
        )
        if arguments.command == "export":
            write_export(found, arguments)
    except ZerolmError as error:
        print(f"zerolm {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


def upload(arguments: argparse.Namespace) -> int:
    """Send what is missing over there; what failed was said by then."""
    from zerolm import uploader
    from zerolm.object_store import StoreError
    from zerolm.upload_rules import url_problem

    problem = url_problem(arguments.url)
    if problem:
        raise ConfigError(f"{arguments.url}: {problem}")
    try:
        sent = uploader.upload(
            arguments.run_dir, arguments.url, arguments.keep, arguments.of_process
        )
    except StoreError:
        return EXIT_BUG
    if not sent and arguments.of_process is None:
        print(f"{arguments.url}: has every checkpoint of {arguments.run_dir} already")
    return EXIT_DONE


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate an exported model, print the figures, and write them down."""
    from zerolm.evaluate_export import evaluate_export
    from zerolm.files import write_json

    found = evaluate_export(
        arguments.model,
        tasks=[name.strip() for name in arguments.tasks.split(",") if name.strip()],
        task_path=arguments.eval_task_path,
        task_items=arguments.eval_task_items,
        hellaswag_name=arguments.hellaswag,
        hellaswag_items=arguments.hellaswag_items,
        device=arguments.device,
    )
    if arguments.output is not None:
        write_json(arguments.output, found)
    return EXIT_DONE


def restore(arguments: argparse.Namespace) -> int:
    """Fetch a run back, unless it is going on or has that checkpoint."""
    from zerolm import run_directory
    from zerolm.restore import restore
    from zerolm.upload_rules import url_problem

    problem = url_problem(arguments.url)
    if problem:
        raise ConfigError(f"{arguments.url}: {problem}")
    with run_directory.claim(arguments.run_dir):
        found = restore(arguments.url, arguments.run_dir, arguments.step)
    if found is None:
        raise CheckpointError(f"{arguments.url}: there is no whole checkpoint.")
    return EXIT_DONE


def whole_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, or the newest of a run directory, and verify every file."""
    found = newest(path) if (path / "checkpoints").is_dir() else read(path)
    if found is None:
        raise CheckpointError(f"{path}: the run has no checkpoint yet.")
    problems = problems_of(found)
    if problems:
        raise CheckpointError(problems)
    return found


def write_export(found: Checkpoint, arguments: argparse.Namespace) -> None:
    """Export with the tokenizer that made the data, as far as run.json and the shards still say."""
    from zerolm import hub
    from zerolm.export import MAX_SHARD_BYTES, check_room, export
    from zerolm.model_card import PICTURE, model_card
    from zerolm.plot import plot_losses
    from zerolm.shards import open_source
    from zerolm.url import is_url

    output, run_dir = arguments.output, found.directory.parent.parent
    check_room(output, 0)
    if arguments.push:
        hub.check(arguments.push, arguments.public)
    tokenizer_dir, eos_id = None, None
    record = run_dir / "run.json"
    if record.is_file():
        entry = json.loads(record.read_text())["settings"]["data"][0]
        data = entry.rsplit("=", 1)[0]
        if is_url(data) or (Path(data) / "manifest.json").is_file():
            source = open_source(data)
            tokenizer_dir, eos_id = source.tokenizer_directory(), source.eos_id
    if tokenizer_dir is None or not tokenizer_dir.is_dir():
        print(f"note: {run_dir}: its token shards hold no tokenizer here; the export has none")

    def card(num_parameters: int) -> dict[str, bytes]:
        files = {}
        # No metrics beside the checkpoint, no picture.
        with tempfile.TemporaryDirectory() as directory, suppress(ConfigError):
            picture = Path(directory) / PICTURE
            last_step = found.progress.step
            files[PICTURE] = plot_losses([run_dir], picture, last_step).read_bytes()
        name = arguments.push or output.absolute().name
        text = model_card(run_dir, found.manifest, name, num_parameters, bool(files))
        return {**files, "README.md": text.encode()}

    said = export(
        found.directory,
        found.manifest,
        output,
        arguments.precision,
        tokenizer_dir,
        eos_id,
        card,
        arguments.max_shard_size or MAX_SHARD_BYTES,
    )
    print(f"{output}: {said}")
    print("load it with AutoModelForCausalLM.from_pretrained")
    if arguments.push:
        print(hub.push(output, arguments.push, arguments.public))


def size_bytes(text: str) -> int:
    """Read a size as 5GB, 500MB or a number of bytes."""
    number = parse_number(text[:-1] if text[-2:-1].isalpha() and text[-1] in "bB" else text)
    if number < 1 or isinstance(number, float):
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
