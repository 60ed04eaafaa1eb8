"""`gguf`: convert an exported model for llama.cpp, with the converter of llama.cpp."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "converter",
        type=Path,
        help="convert_hf_to_gguf.py of a checkout of llama.cpp; it is executed",
    )
    add("model", type=Path, help="directory that zerolm export or merge wrote")
    add("arguments", nargs="*", metavar="...", help="after --: arguments for the converter")


def run(options: argparse.Namespace) -> None:
    from data_prep.tokenizer.llama_cpp import convert

    convert(options.converter, options.model, options.arguments)
