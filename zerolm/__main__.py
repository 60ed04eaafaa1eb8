"""What comes after a run: export it, evaluate, report, look at it, copy it, fetch it back."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zerolm import processes
from zerolm.checkpoint_directory import Checkpoint, newest, problems_of, read
from zerolm.command_flags import parser
from zerolm.errors import EXIT_BUG, EXIT_DONE, CheckpointError, ConfigError, ZerolmError


def main(argv: list[str]) -> int:
    arguments = parser(__doc__).parse_args(argv)
    calls: dict[str, Callable[[argparse.Namespace], int]] = {
        "verify-checkpoint": verify_checkpoint,
        "export": export_checkpoint,
        "evaluate": evaluate,
        "decode-batch": decode_batch,
        "report": report,
        "status": status,
        "plot": plot,
        "upload": upload,
        "restore": restore,
        "wandb-sync": wandb_sync,
        "wandb-workspace": wandb_workspace,
        "mirror": mirror,
    }
    try:
        return calls[arguments.command](arguments)
    except ZerolmError as error:
        print(f"zerolm {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code


# -------------------------------------------------------------------------------------------------
# Looking at a run


def plot(arguments: argparse.Namespace) -> int:
    from zerolm.plot import plot_losses

    plot_losses(arguments.runs, arguments.output)
    print(arguments.output)
    return EXIT_DONE


def report(arguments: argparse.Namespace) -> int:
    from zerolm.report import write_report

    if arguments.of_process is not None:
        processes.serve(arguments.of_process)
    page = write_report(arguments.runs, arguments.output)
    if arguments.of_process is None:
        print(page)
    return EXIT_DONE


def status(arguments: argparse.Namespace) -> int:
    from zerolm.status import show

    show(arguments.runs, watch=arguments.watch, as_json=arguments.json)
    return EXIT_DONE


def decode_batch(arguments: argparse.Namespace) -> int:
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


# -------------------------------------------------------------------------------------------------
# W&B


def mirror(arguments: argparse.Namespace) -> int:
    from zerolm.mirror import mirror

    mirror(arguments.run_dir, arguments.name, arguments.of_process)  # ends the process itself
    return EXIT_DONE


def wandb_sync(arguments: argparse.Namespace) -> int:
    from zerolm.wandb_sync import wandb_sync

    given = {key: getattr(arguments, key) for key in ("mode", "project", "entity")}
    wandb_sync(arguments.run_dir, same_id=arguments.same_id, **given)
    return EXIT_DONE


def wandb_workspace(arguments: argparse.Namespace) -> int:
    from zerolm.wandb_workspace import make

    print(make(arguments.run_dir, arguments.project, arguments.entity, arguments.print))
    return EXIT_DONE


# -------------------------------------------------------------------------------------------------
# Stores


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


def restore(arguments: argparse.Namespace) -> int:
    """Fetch a run back, unless it is going on or has that checkpoint."""
    from zerolm import run_directory
    from zerolm.restore import restore, whole_steps
    from zerolm.upload_rules import url_problem

    problem = url_problem(arguments.url)
    if problem:
        raise ConfigError(f"{arguments.url}: {problem}")
    found = None
    if whole_steps(arguments.url, arguments.step):  # else no run directory is made
        with run_directory.claim(arguments.run_dir):
            found = restore(arguments.url, arguments.run_dir, arguments.step)
    if found is None:
        raise CheckpointError(f"{arguments.url}: there is no whole checkpoint. Correct the URL.")
    return EXIT_DONE


# -------------------------------------------------------------------------------------------------
# Models


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


def verify_checkpoint(arguments: argparse.Namespace) -> int:
    """Compare every file with the manifest."""
    whole_checkpoint(arguments.checkpoint)
    return EXIT_DONE


def export_checkpoint(arguments: argparse.Namespace) -> int:
    """The same, and write a model directory."""
    write_export(whole_checkpoint(arguments.checkpoint), arguments)
    return EXIT_DONE


def whole_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, or the newest of a run directory, and verify every file.

    Says so.
    """
    found = newest(path) if (path / "checkpoints").is_dir() else read(path)
    if found is None:
        raise CheckpointError(f"{path}: the run has no checkpoint yet.")
    problems = problems_of(found)
    if problems:
        raise CheckpointError(problems)
    progress = found.progress
    print(
        f"{found.directory}: whole, {len(found.manifest['files'])} files, step "
        f"{progress.step:,}, {progress.tokens:,} tokens"
    )
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
