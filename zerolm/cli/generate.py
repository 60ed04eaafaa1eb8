"""`generate`: continue a prompt with the model of a run or a model directory."""

import argparse
import sys
from contextlib import redirect_stdout

from zerolm.common.command_line import count, count_from_zero, number_from_zero, share

DEFAULT_TOKENS = 256


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="RUN, RUN@STEP, a checkpoint, or a model directory")
    add(
        "--prompt",
        metavar="TEXT",
        help="text to continue (default: all of stdin)",
    )
    add(
        "--sample_length",
        type=count,
        default=DEFAULT_TOKENS,
        metavar="TOKENS",
        help=f"maximum new tokens of a text (default: {DEFAULT_TOKENS})",
    )
    add("--num_samples", type=count, default=1, metavar="N", help="texts per prompt (default: 1)")
    add(
        "--temperature",
        type=number_from_zero,
        default=0.8,
        metavar="X",
        help="sampling temperature; 0: always the most likely token (default: 0.8)",
    )
    add(
        "--top_k",
        type=count_from_zero,
        default=0,
        metavar="N",
        help="sample from the N most likely tokens; 0: from all (default: 0)",
    )
    add(
        "--top_p",
        type=share,
        default=1.0,
        metavar="X",
        help="sample from the most likely tokens whose probabilities add up to X (default: 1)",
    )
    add(
        "--seed",
        type=count_from_zero,
        default=0,
        metavar="N",
        help="of the first text; each further one takes the next number (default: 0)",
    )
    add("--device", help="torch device (default: a GPU if there is one)")


def run(arguments: argparse.Namespace) -> None:
    from zerolm.evaluate.sampling import Prompt, SamplingOptions, streamed_text
    from zerolm.evaluate.text_coder import TextCoder, prompt_ids
    from zerolm.export.checkpoint_model import load_model

    with redirect_stdout(sys.stderr):  # notices of libraries; stdout is for the text
        loaded = load_model(arguments.model, arguments.device)
    coder = TextCoder(loaded.tokenizer, loaded.eos_id)
    print(loaded.about, *(f"note: {line}" for line in coder.notices), sep="\n", file=sys.stderr)
    text = arguments.prompt
    if text is None:
        if sys.stdin.isatty():
            print("Type the text to continue; Ctrl-D ends it.", file=sys.stderr)
        text = sys.stdin.read().removesuffix("\n")
    options = SamplingOptions(arguments.temperature, arguments.top_k, arguments.top_p)
    for number in range(arguments.num_samples):
        seed = arguments.seed + number
        prompt = Prompt(prompt_ids(coder, text), arguments.sample_length, options, seed)
        print("\n" * (number > 0) + text, end="", flush=True)
        for piece in streamed_text(loaded.model, coder, prompt):
            print(piece, end="", flush=True)
        print()
