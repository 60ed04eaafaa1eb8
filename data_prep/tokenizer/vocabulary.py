"""Reads a saved tokenizer's vocabulary: the text of each token, and which tokens are special.

Reads the files directly, without tokenizer libraries. Parsing a tokenizer.json takes 20 ms (32,000
ids), so the last one is cached until `forget_definition` is called.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from zerolm.shards.tokenizer import TIKTOKEN_FILE, read_tiktoken


def token_texts(directory: Path) -> dict[int, str]:
    """Return {id: text} for all tokens except special tokens; bytes that are not UTF-8 are left
    out.
    """
    if (directory / TIKTOKEN_FILE).is_file():
        ranks = read_tiktoken(directory)._mergeable_ranks
        return {rank: token.decode("utf-8", "ignore") for token, rank in ranks.items()}
    if not (directory / "tokenizer.json").is_file():
        return {}
    content = read_definition(directory)
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # a Unigram model: pairs of token and score
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    special = {each["id"] for each in content["added_tokens"] if each["special"]}
    texts = {number: token for token, number in vocab.items() if number not in special}
    if "ByteLevel" in json.dumps(content["pre_tokenizer"]):
        byte_of = byte_level_alphabet()
        return {
            number: bytes(byte_of.get(one, 32) for one in token).decode("utf-8", "ignore")
            for number, token in texts.items()
        }
    return texts


def unknown_id(directory: Path) -> int | None:
    """Return the id of the unknown token; None if every text can be encoded.

    Also returns None if there is no tokenizer.json, because the id is then unknown.
    """
    if not (directory / "tokenizer.json").is_file():
        return None
    model = read_definition(directory)["model"]
    if "unk_id" in model:  # a Unigram model
        return model["unk_id"]
    token = model.get("unk_token")
    return None if token is None else model["vocab"].get(token)


def added_tokens(directory: Path) -> list[str]:
    """Return the tokens, special or not, that were added to the model's own vocabulary."""
    if (directory / TIKTOKEN_FILE).is_file():
        return list(read_tiktoken(directory)._special_tokens)
    if not (directory / "tokenizer.json").is_file():
        return []
    content = read_definition(directory)
    return [each["content"] for each in content["added_tokens"]]


@lru_cache(maxsize=1)
def _parse(content: bytes) -> dict[str, Any]:
    return orjson.loads(content)


def read_definition(directory: Path) -> dict[str, Any]:
    """Return the content of tokenizer.json, which must not be modified.

    Raises:
        OSError, ValueError: the file cannot be read, or is not JSON.
    """
    return _parse((directory / "tokenizer.json").read_bytes())


def forget_definition() -> None:
    """Release the memory of the cached tokenizer.json."""
    _parse.cache_clear()


def read_without_special_tokens(directory: Path) -> dict[str, Any]:
    """Return a tokenizer.json without its special tokens, so that these are encoded as ordinary
    text.
    """
    content = read_definition(directory)
    added = [each for each in content["added_tokens"] if not each["special"]]
    removed = dict.fromkeys(("truncation", "padding", "post_processor"))
    return {**content, "added_tokens": added, **removed}


def byte_level_alphabet() -> dict[str, int]:
    """Return a mapping from the characters of byte-level BPE to the bytes that they represent.

    Source: Radford et al. 2019, `bytes_to_unicode` of GPT-2's encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
