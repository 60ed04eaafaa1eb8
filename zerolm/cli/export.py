"""`export`: write a checkpoint as a Hugging Face model directory, with tokenizer and model card."""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zerolm.checkpoint.directory import Checkpoint
from zerolm.cli.verify_checkpoint import CHECKPOINT_HELP, verified_checkpoint
from zerolm.common.command_line import size_bytes
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.run_dir.records import find_run_json


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, help=CHECKPOINT_HELP)
    add("output", type=Path, help="directory to create for the model")
    add(
        "--ema",
        action="store_true",
        help="export the moving average of the weights (from a run with --ema_tokens)",
    )
    add_output_flags(parser)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that write a model directory."""
    add = parser.add_argument
    add(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help="precision of the exported weights (default: as in training)",
    )
    add(
        "--max_shard_size",
        type=size_bytes,
        metavar="BYTES",
        help="maximum size of a safetensors file, and roughly the memory needed (default: 5GB)",
    )
    add("--push", metavar="USER/NAME", help="also push the model to a private Hugging Face repo")
    add("--public", action="store_true", help="with --push: make the repo public")


def run(arguments: argparse.Namespace) -> None:
    from zerolm.engine.ema import STATE, is_metric_of_average
    from zerolm.export.export import export
    from zerolm.export.tokenizer import generation_of

    checkpoint = verified_checkpoint(arguments.checkpoint)
    run_dir, average = run_of(checkpoint), arguments.ema
    if average and "ema" not in checkpoint.progress.features:
        raise ConfigError(
            f"--ema: {checkpoint.directory} contains no moving average of the weights. Export a "
            "checkpoint of a run with --ema_tokens, or average several checkpoints with zerolm "
            "merge."
        )

    def write(tokenizer_dir: Path | None, eos_id: int | None, name: str, max_bytes: int) -> str:
        return export(
            checkpoint.directory,
            checkpoint.manifest,
            arguments.output,
            arguments.precision,
            tokenizer_dir,
            eos_id,
            lambda count: model_files(
                checkpoint,
                name,
                count,
                _about_average(run_dir) if average else "",
                lambda key: is_metric_of_average(key) == average,
            ),
            max_bytes,
            state=STATE if average else None,
            source=generation_of(run_dir),
        )

    write_output(arguments, run_dir, write)


def _about_average(run_dir: Path) -> str:
    """Return the model card's sentence about the exponential moving average."""
    settings = (find_run_json(run_dir) or {}).get("settings", {})
    half_life = settings.get("ema_tokens")
    return "The weights are an exponential moving average over the training" + (
        f", with a half-life of {half_life:,} tokens." if isinstance(half_life, int) else "."
    )


def run_of(checkpoint: Checkpoint) -> Path:
    """Return the run directory that contains a checkpoint."""
    return checkpoint.directory.parent.parent


def write_output(
    arguments: argparse.Namespace,
    run_dir: Path,
    write: Callable[[Path | None, int | None, str, int], str],
) -> None:
    """Write a model directory according to the output flags, and push it if requested.

    Args:
        write: function of (tokenizer directory, EOS id, model name, maximum file size) that writes
            the model and returns a line to print.
    """
    from safetensors import SafetensorError

    from zerolm.export import hub
    from zerolm.export.export import MAX_SHARD_BYTES, check_room
    from zerolm.export.tokenizer import first_source, missing_tokenizer, tokenizer_of
    from zerolm.shards import boundaries

    output = arguments.output
    check_room(output, 0)
    if arguments.push:
        hub.check(arguments.push, arguments.public)
    tokenizer_dir, eos_id = tokenizer_of(run_dir)
    if tokenizer_dir is None or not tokenizer_dir.is_dir():
        print(
            f"note: {missing_tokenizer(run_dir)}, so the model directory has no tokenizer. Restore "
            f"the shards and export again, or copy the tokenizer's files to {output}"
        )
    if (source := first_source(run_dir)) is not None:
        for line in boundaries.notices(source):
            print(f"note: {line}")
    name = arguments.push or output.absolute().name
    try:
        result = write(tokenizer_dir, eos_id, name, arguments.max_shard_size or MAX_SHARD_BYTES)
    except (OSError, SafetensorError) as error:  # a full disk, for example
        raise ZerolmError(f"{output}: nothing was exported: {error}") from error
    print(f"{output}: {result}")
    print("load it with AutoModelForCausalLM.from_pretrained")
    if arguments.push:
        print(hub.push(output, arguments.push, arguments.public))


def model_files(
    checkpoint: Checkpoint,
    name: str,
    num_parameters: int,
    about: str = "",
    measured: Callable[[str], bool] = lambda key: True,
) -> dict[str, bytes]:
    """Return {file name: content} for the model card and, if the run has metrics, a loss plot."""
    from zerolm.export.model_card import PICTURE, model_card
    from zerolm.report.plot import plot_losses

    run_dir = run_of(checkpoint)
    files = {}
    with tempfile.TemporaryDirectory() as directory, suppress(ConfigError):  # no metrics, no plot
        plot = plot_losses([run_dir], Path(directory) / PICTURE, checkpoint.progress.step)
        files[PICTURE] = plot.read_bytes()
    text = model_card(
        run_dir, checkpoint.manifest, name, num_parameters, bool(files), about, measured
    )
    return {**files, "README.md": text.encode()}
