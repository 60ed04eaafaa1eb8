"""A small corpus, and the command as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

from tests import ROOT

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
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "data_prep", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def write_jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    return path
