"""A small corpus, and the command as a user runs it."""

import json
import subprocess
from pathlib import Path

from tests.launching import run_module

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n" * 3,
    "def f(x):\n    return x + 1\n",
    "Žluťoučký kůň, 日本語のテキスト, \U0001f600\u200d\u2028 and a\x00nul",
    "It spells <|endoftext|> out, twice: <|endoftext|>",
    " ",
    "one",
    "the lazy dog " * 40,
]


def data_prep(*words: object, timeout: float = 120) -> subprocess.CompletedProcess:
    """Run the command in a process of its own."""
    return run_module("data_prep", *words, timeout=timeout)


def write_jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    return path
