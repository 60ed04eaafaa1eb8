"""`gguf`: convert an exported model to GGUF with llama.cpp's converter."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "converter",
        type=Path,
        help="convert_hf_to_gguf.py in a llama.cpp checkout; it is executed",
    )
    add("model", type=Path, help="directory written by zerolm export or zerolm merge")
    add("arguments", nargs="*", metavar="...", help="after --: arguments for the converter")


def run(options: argparse.Namespace) -> None:
    from data_prep.tokenizer.llama_cpp import convert

    convert(options.converter, options.model, options.arguments)
