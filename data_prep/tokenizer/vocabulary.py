"""What a tokenizer's copy says of its tokens: their texts, and which of them are special.

Reads the files alone, without the libraries that encode by them.
"""

import json
from pathlib import Path
from typing import Any

import orjson

from zerolm.tokenizer_copy import TIKTOKEN_FILE, read_encoding


def spellings(directory: Path) -> dict[int, str]:
    """Return {id: text} of a copy's tokens but for special ones; bytes of no character left out."""
    if (directory / TIKTOKEN_FILE).is_file():
        ranks = read_encoding(directory)._mergeable_ranks
        return {rank: token.decode("utf-8", "ignore") for token, rank in ranks.items()}
    if not (directory / "tokenizer.json").is_file():
        return {}
    content = json.loads((directory / "tokenizer.json").read_bytes())
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # of Unigram: pairs of token and score
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    special = {each["id"] for each in content["added_tokens"] if each["special"]}
    texts = {number: token for token, number in vocab.items() if number not in special}
    if "ByteLevel" in json.dumps(content["pre_tokenizer"]):
        byte_of = byte_of_character()
        return {
            number: bytes(byte_of.get(one, 32) for one in token).decode("utf-8", "ignore")
            for number, token in texts.items()
        }
    return texts


def special_tokens(directory: Path) -> list[str]:
    """Return the tokens of a copy that stand beside its vocabulary of text."""
    if (directory / TIKTOKEN_FILE).is_file():
        return list(read_encoding(directory)._special_tokens)
    if not (directory / "tokenizer.json").is_file():
        return []
    content = json.loads((directory / "tokenizer.json").read_bytes())
    return [each["content"] for each in content["added_tokens"]]


def without_special_tokens(directory: Path) -> dict[str, Any]:
    """Return tokenizer.json without what must not be found in text: there, they are text."""
    content = orjson.loads((directory / "tokenizer.json").read_bytes())
    content["added_tokens"] = [each for each in content["added_tokens"] if not each["special"]]
    content["truncation"] = content["padding"] = content["post_processor"] = None
    return content


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet of bytes (Radford et al. 2019, `bytes_to_unicode` of encoder.py)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
