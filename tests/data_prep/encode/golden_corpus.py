"""A corpus and a tokenizer made by arithmetic, so that their shards never change.

The tokenizer is written out here and not trained: no change of a library's trainer moves an id.
"""

import gzip
import json
import random
from pathlib import Path

WORDS = [
    "the",
    " lazy",
    " dog",
    "\n",
    "žluť",
    "日本",
    "\U0001f600",
    " don't",
    " 12",
    "<|endoftext|>",
]
MERGES = ["t h", "th e", "Ġ d", "o g", "Ġd og", "Ġ l", "a z", "Ġl az", "Å ¾"]


def byte_alphabet() -> list[str]:
    """Return GPT-2's 256 printable characters for bytes, as its encoder.py numbers them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + number) for number in range(len(others))]


def write_golden_tokenizer(directory: Path) -> Path:
    """Write a byte-level BPE of 266 ids with nine merges; id 0 ends documents."""
    tokens = ["<|endoftext|>", *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"id": 0, "content": tokens[0], "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    backend = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**special, **flags}],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[0]}
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps(backend))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def golden_texts(count: int, seed: int = 0) -> list[str]:
    """Return documents of 1 to 400 words; every 50th is empty."""
    rng = random.Random(seed)
    return [
        "".join(rng.choices(WORDS, k=rng.randrange(1, 400))) if number % 50 else ""
        for number in range(count)
    ]


def write_golden_corpus(directory: Path) -> Path:
    """Write JSON lines, the same compressed, and a text file: 1,501 documents, 20 of them empty."""
    directory.mkdir(parents=True)
    texts = golden_texts(1500)
    lines = [json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)]
    (directory / "a.jsonl").write_text("".join(lines[:900]))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[900:]).encode(), mtime=0))
    (directory / "c.txt").write_text("one text file\n" * 100)
    return directory
