"""Token shards of random texts for tests of finished shards, made by the tokenize command."""

import random
from pathlib import Path

from data_prep.__main__ import main
from tests.data_prep.small_corpus import TEXTS, write_jsonl

WORDS = sorted({word for text in TEXTS for word in text.split()})


def texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of 1 to 60 words, every tenth a copy of an earlier one."""
    generator = random.Random(seed)
    made: list[str] = []
    for number in range(count):
        if number % 10 == 9:
            made.append(generator.choice(made))
        else:
            made.append(" ".join(generator.choices(WORDS, k=generator.randint(1, 60))))
    return made


def tokenize(inputs: list[Path], tokenizer: Path, output: Path, *flags: object) -> Path:
    """Tokenize files in this process; return the shard directory."""
    words = ["--input", *inputs, "--tokenizer", tokenizer, "--output", output, "--workers", 1]
    assert main(list(map(str, ["tokenize", *words, "--encoder", "tokenizers", *flags]))) == 0
    return output


def write_corpus(directory: Path, tokenizer: Path) -> tuple[Path, Path]:
    """Write two files of 200 documents, and shards of each of them."""
    files = [
        write_jsonl(directory / f"{name}.jsonl", texts(200, seed))
        for seed, name in enumerate(("a", "b"))
    ]
    one, two = (
        tokenize([file], tokenizer, directory / file.stem, "--shard_tokens", 3000) for file in files
    )
    return one, two
