"""Compare the tokenizer of token shards with the tokenizer of a run's initial weights.

If they encode the same text differently, training raises no error, but its initial loss is worse
than with random weights.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path

from zerolm.common.errors import ConfigError, reason
from zerolm.shards.tokenizer import TIKTOKEN_FILE, TIKTOKEN_RANKS, load_auto_tokenizer, load_backend

TOKENIZER = "tokenizer.json"
OTHER_FILES = ("tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model")
SHOWN = 3  # tokens in a message


def vocabulary(directory: Path) -> Mapping[str, int] | None:
    """Return {token: id} for a tokenizer directory, with byte-level tokens spelled as in GPT-2.

    Return None if the directory contains no tokenizer.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
    """
    if (directory / TOKENIZER).is_file():
        try:
            return load_backend(directory / TOKENIZER).get_vocab()
        except Exception as error:  # the library raises bare Exceptions
            why = reason(error, named=False)
            raise ConfigError(
                f"{directory / TOKENIZER}: cannot be read ({why}). Restore it."
            ) from None
    if (directory / TIKTOKEN_FILE).is_file():
        return _tiktoken_vocabulary(directory)
    if any((directory / name).is_file() for name in OTHER_FILES):
        return load_auto_tokenizer(str(directory), local=True).get_vocab()
    return None


def _tiktoken_vocabulary(directory: Path) -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    found = {}
    for line in (directory / TIKTOKEN_RANKS).read_bytes().splitlines():
        token, rank = line.split()
        found["".join(letters[byte] for byte in base64.b64decode(token))] = int(rank)
    content = json.loads((directory / TIKTOKEN_FILE).read_text(encoding="utf-8"))
    return found | content["special_tokens"]


def difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """Return how two vocabularies differ, as text; empty if one of them extends the other."""
    common = ours.keys() & theirs.keys()
    moved = sorted(
        (token for token in common if ours[token] != theirs[token]), key=lambda token: theirs[token]
    )
    if moved:
        examples = (f"{token!r} is {ours[token]}, not {theirs[token]}" for token in moved[:SHOWN])
        return f"{len(moved):,} of {len(common):,} common tokens have other ids: " + ", ".join(
            examples
        )
    ids = set(ours.values()) & set(theirs.values())
    if ids and len(common) < len(ids) / 2:
        return f"only {len(common):,} of {len(ids):,} ids stand for the same token"
    return ""
