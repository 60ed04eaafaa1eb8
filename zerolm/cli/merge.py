"""`merge`: write the weighted mean of several checkpoints as a Hugging Face model directory."""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from zerolm.checkpoint.directory import Checkpoint, locate_several
from zerolm.cli.export import add_output_flags, model_files, run_of, write_output
from zerolm.cli.verify_checkpoint import file_problems
from zerolm.common.command_line import number
from zerolm.common.errors import ConfigError
from zerolm.optim.schedule import DECAY_SHAPES

METHODS = ("mean", "ema", "wsm")
WSM_SHAPE = "linear"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="+",
        metavar="RUN[@STEPS]",
        help="checkpoints to merge: RUN, a run directory, for all of its checkpoints; "
        "RUN@100,200,300; RUN@100:300 for steps 100 to 300; or the directory of a checkpoint",
    )
    add("output", type=Path, metavar="OUT", help="directory to create for the model")
    add(
        "--method",
        choices=METHODS,
        default="mean",
        help="mean: equal weights; ema: an exponential moving average of the checkpoints; wsm: the "
        "weights that approximate a learning-rate decay from the first checkpoint to the last "
        "(default: mean)",
    )
    add(
        "--ema_decay",
        type=number,
        metavar="X",
        help="with ema: weight of the average so far when another checkpoint is added, above 0 and "
        "below 1",
    )
    add(
        "--decay_shape",
        choices=tuple(DECAY_SHAPES),
        help=f"with wsm: shape of the decay (default: {WSM_SHAPE}, as with --schedule wsd)",
    )
    add_output_flags(parser)


def run(arguments: argparse.Namespace) -> None:
    method = arguments.method
    _check_flags(method, arguments.ema_decay, arguments.decay_shape)
    checkpoints = _find(arguments.checkpoints, arguments.output, ordered=method != "mean")
    from zerolm.export.export import write_model
    from zerolm.export.merge import (
        MergedWeights,
        ema_coefficients,
        mean_coefficients,
        wsm_coefficients,
    )
    from zerolm.export.tokenizer import generation_of

    tokens = [checkpoint.progress.tokens for checkpoint in checkpoints]
    shape = arguments.decay_shape or WSM_SHAPE
    if method == "ema":
        coefficients = ema_coefficients(tokens, arguments.ema_decay)
    elif method == "wsm":
        coefficients = wsm_coefficients(tokens, DECAY_SHAPES[shape])
    else:
        coefficients = mean_coefficients(tokens)
    details = {"ema": f", decay {arguments.ema_decay}", "wsm": f", {shape} decay"}
    how = method + details.get(method, "")
    rows = _rows(checkpoints, coefficients)
    print(f"merge: {how}, of {len(rows)} checkpoints")
    for line in [("step", "tokens", "weight", "run"), *rows]:
        print("  ".join([*(f"{cell:>14}" for cell in line[:3]), line[3]]))
    newest = checkpoints[-1]
    weights = MergedWeights(checkpoints, coefficients)

    def write(tokenizer_dir: Path | None, eos_id: int | None, name: str, max_bytes: int) -> str:
        return write_model(
            weights,
            newest.manifest,
            arguments.output,
            arguments.precision,
            tokenizer_dir,
            eos_id,
            lambda count: model_files(newest, name, count, _about(how, rows), lambda key: False),
            lambda directory, _: weights.check(directory),
            max_bytes,
            generation_of(run_of(newest)),
        )

    write_output(arguments, run_of(newest), write)


def _check_flags(method: str, ema_decay: float | None, decay_shape: str | None) -> None:
    problems = []
    if method == "ema" and ema_decay is None:
        problems.append("--method ema: needs --ema_decay. Add, for example, --ema_decay 0.8.")
    if ema_decay is not None and not 0.0 < ema_decay < 1.0:
        problems.append(f"--ema_decay {ema_decay}: must be above 0 and below 1.")
    for flag, value, its in (
        ("--ema_decay", ema_decay, "ema"),
        ("--decay_shape", decay_shape, "wsm"),
    ):
        if value is not None and method != its:
            problems.append(f"{flag} {value}: applies only to --method {its}. Remove it.")
    if problems:
        raise ConfigError(problems)


def _find(references: Sequence[str], output: Path, *, ordered: bool) -> list[Checkpoint]:
    """Find the checkpoints, check that they can be merged, and return them, oldest first.

    If `ordered`, all checkpoints must have different token counts.
    """
    from zerolm.export.export import check_room

    problems: list[str] = []
    found: dict[Path, Checkpoint] = {}
    try:
        check_room(output, 0)
    except ConfigError as error:
        problems += error.problems
    for reference in references:
        try:
            for checkpoint in locate_several(reference):
                path = checkpoint.directory.resolve()
                if path in found:
                    problems.append(f"{reference}: {path.name} is listed twice. List it once.")
                found[path] = checkpoint
        except ConfigError as error:
            problems += error.problems
    checkpoints = sorted(
        found.values(), key=lambda each: (each.progress.tokens, each.progress.step, each.digest)
    )
    if len(checkpoints) < 2 and not problems:
        problems.append(
            f"{', '.join(references)}: {len(checkpoints)} checkpoint found, but a merge needs at "
            "least two. Name others, or keep more with --checkpoint_keep."
        )
    for before, after in pairwise(checkpoints):
        if ordered and before.progress.tokens == after.progress.tokens:
            problems.append(
                f"{before.directory} and {after.directory}: have the same number of tokens, so "
                "they are not from one trajectory. Use --method mean, or name only one of them."
            )
    if not problems:
        problems = _differences(checkpoints)
    if not problems:
        problems = [line for checkpoint in checkpoints for line in file_problems(checkpoint)]
    if problems:
        raise ConfigError(problems)
    return checkpoints


def _differences(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Return a line for each difference between the models and tokenizers of checkpoints."""
    from zerolm.export.merge import model_differences
    from zerolm.export.tokenizer import first_source
    from zerolm.preflight.run_record import IRRELEVANT_MODEL_KEYS

    problems = model_differences(checkpoints, IRRELEVANT_MODEL_KEYS)
    first: tuple[Path, str] | None = None
    for run_dir in dict.fromkeys(map(run_of, checkpoints)):
        source = first_source(run_dir)
        if source is None:
            continue  # the run's token shards were deleted
        fingerprint = source.head["tokenizer"]["fingerprint"]
        first = first or (run_dir, fingerprint)
        if fingerprint != first[1]:
            problems.append(
                f"{run_dir}: tokenizer {fingerprint[:16]}, but {first[0]} has {first[1][:16]}. "
                "Merge only checkpoints with the same tokenizer."
            )
    return problems


def _rows(
    checkpoints: Sequence[Checkpoint], coefficients: Sequence[float]
) -> list[tuple[str, str, str, str]]:
    """Return the table row (step, tokens, weight, run) for each checkpoint."""
    return [
        (
            f"{checkpoint.progress.step:,}",
            f"{checkpoint.progress.tokens:,}",
            f"{coefficient:.6f}",
            run_of(checkpoint).name,
        )
        for checkpoint, coefficient in zip(checkpoints, coefficients, strict=True)
    ]


def _about(how: str, rows: Sequence[tuple[str, str, str, str]]) -> str:
    """Return the model card's section about the merge."""
    from zerolm.export.model_card import table

    text = (
        f"The weights are a merge of {len(rows)} checkpoints ({how}): their weighted mean, "
        "computed in float64 from the float32 master weights. The training described below is that "
        "of the newest checkpoint; its evaluations do not apply to the merged weights."
    )
    return "\n\n".join(["## Merged from", text, table(("step", "tokens", "weight", "run"), rows)])
