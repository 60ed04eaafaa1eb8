"""`generate`: continue a prompt with the model of a run or a model directory."""

import argparse
import sys
from contextlib import redirect_stdout

from zerolm.common.command_line import count
from zerolm.parts.parse import add_settings, settings_of

SAMPLING = ("sample_length", "temperature", "top_k", "top_p", "seed")
DEFAULTS = {"sample_length": 256, "top_k": 0}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="RUN, RUN@STEP, a checkpoint, or a model directory")
    add("--prompt", metavar="TEXT", help="text to continue (default: all of stdin)")
    add("--num_samples", type=count, default=1, metavar="N", help="texts per prompt (default: 1)")
    seed = "of the first text; each further text uses the next number (default: 0)"
    add_settings(parser, SAMPLING, DEFAULTS, {"seed": seed})
    add("--device", help="torch device (default: a GPU if there is one)")


def run(arguments: argparse.Namespace) -> None:
    from zerolm.evaluate.sampling import Prompt, SamplingOptions, streamed_text
    from zerolm.evaluate.text_coder import prompt_ids
    from zerolm.export.checkpoint_model import load_model

    settings = settings_of(arguments)
    with redirect_stdout(sys.stderr):  # notices from libraries; stdout is for the generated text
        loaded = load_model(arguments.model, arguments.device)
    coder = loaded.coder
    print(loaded.about, *(f"note: {line}" for line in coder.notices), sep="\n", file=sys.stderr)
    text = arguments.prompt
    if text is None:
        if sys.stdin.isatty():
            print("Type the text to continue; Ctrl-D ends it.", file=sys.stderr)
        text = sys.stdin.read().removesuffix("\n")
    options = SamplingOptions(settings.temperature, settings.top_k, settings.top_p)
    for number in range(arguments.num_samples):
        seed = settings.seed + number
        prompt = Prompt(prompt_ids(coder, text), settings.sample_length, options, seed)
        print("\n" * (number > 0) + text, end="", flush=True)
        for piece in streamed_text(loaded.model, coder, prompt):
            print(piece, end="", flush=True)
        print()
