"""The number of UTF-8 bytes that each token id represents, the denominator of bits per byte.

The numbers are computed from the shards' tokenizer copy. They are then tested on sample texts, to
report tokenizers whose ids do not decode to the original text. Reads no shards. Imports tokenizers
lazily.
"""

import codecs
import re
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple

import numpy as np
import orjson

from zerolm.common.errors import ConfigError, reason
from zerolm.shards.tokenizer import TIKTOKEN_FILE, TOKENIZER_FILE, load_backend, read_tiktoken

WORD_START = "▁"  # sentencepiece's symbol for a space
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # sentencepiece's byte fallback
# Scripts, runs of white space, digits, code, combining and rare characters, a byte order mark.
PROBES = (
    "The naïve café's owner paid 1,234.50 € in 2024 -- didn't she?",
    "def f(x):\n\treturn {'a': x[0]}  # note\r\n\n    pass\n",
    "Сегодня 今日は天気がいい 오늘 שלום مرحبا สวัสดี नमस्ते",
    "🙂👩🏽‍🚀 ∑ x² ≤ ﬁ e\u0301 \ufeff\u200b\u3000 \U00013080 <|endoftext|> </s> [UNK] <0x41>",
    "a  b   c                d\t\te \n \n",
)


class TokenBytes(NamedTuple):
    """Number of text bytes for each token id.

    Attributes:
        counts: (V,) int64; 0 for special tokens, which represent no text.
        first: (V,) int64; the same for the first token in a document, where some tokenizers insert
            a space that is not in the text.
        notice: how the numbers differ from the size of the original text; "" if they do not.
    """

    counts: np.ndarray
    first: np.ndarray
    notice: str = ""

    def rows(self) -> np.ndarray:
        """Return an array with the row `counts` and, if it differs, the row `first`: (1 or 2,
        V).
        """
        is_same = bool((self.counts == self.first).all())
        return np.stack([self.counts] if is_same else [self.counts, self.first])

    def of(self, ids: np.ndarray) -> int:
        """Return the number of text bytes in a document, given its (N,) ids without the EOS."""
        if not len(ids):
            return 0
        return int(self.first[ids[0]] + self.counts[ids[1:]].sum())


def read_token_bytes(directory: Path, vocab_size: int) -> TokenBytes:
    """Return the number of text bytes for each token, given a tokenizer directory.

    Args:
        directory: the tokenizer copy stored with shards, or an exported model.
        vocab_size: number of ids; ids unknown to the tokenizer count 0 bytes.

    Raises:
        ConfigError: there is no tokenizer, or its tokens do not represent a fixed text.
    """
    if (directory / TIKTOKEN_FILE).is_file():
        encoding = read_tiktoken(directory)
        texts = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        counts = _table({number: len(text) for number, text in texts.items()}, vocab_size)
        return TokenBytes(counts, counts)  # every byte is also a token, so encoding is lossless
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file, so the bytes per token are unknown. Tokenize with a tokenizer "
            "that has this file, or with tiktoken."
        )
    try:
        backend = load_backend(path)
        content = _read(path)
        model, added = content["model"], content.get("added_tokens") or []
        sizes, starts = _sizes(content, model.get("vocab") or {}, path)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"{path}: cannot be read ({reason(error)}). Tokenize again.") from None
    extra = {
        token["id"]: 0 if token["special"] else len(token["content"].encode()) for token in added
    }
    if not sizes and not any(extra.values()):
        raise ConfigError(f"{path}: the vocabulary is empty. Tokenize again.")
    counts = _table(sizes | extra, vocab_size)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(text: str) -> np.ndarray:
        return np.array(backend.encode(text, add_special_tokens=False).ids, np.int64)

    adds_space = any(int(counts[encode(letter)].sum()) == 2 for letter in ascii_letters)
    first = counts.copy()
    if adds_space:
        first[[number for number in starts if number not in extra]] -= 1
    table = TokenBytes(counts, first)
    return table._replace(notice=_notice(table, encode, backend, content))


def exact_bytes(directory: Path, vocab_size: int) -> np.ndarray | None:
    """Return the number of bytes for each token, (V,) int64, if they always add up to the text
    size.

    Returns None if that is not certain.

    It is certain only for byte-level tokenizers, which neither change nor skip text.

    Raises:
        ConfigError: as for `read_token_bytes`.
    """
    table = read_token_bytes(directory, vocab_size)
    if table.notice or not (table.counts == table.first).all():
        return None
    if not (directory / TIKTOKEN_FILE).is_file():
        content = _read(directory / TOKENIZER_FILE)
        added = [token for token in content.get("added_tokens") or [] if not token["special"]]
        is_byte_level = "ByteLevel" in _kinds(content.get("decoder"))
        if content.get("normalizer") or added or not is_byte_level:
            return None
    return table.counts


def _read(path: Path) -> dict[str, Any]:
    return orjson.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))


def _table(sizes: dict[int, int], vocab_size: int) -> np.ndarray:
    counts = np.zeros(max(vocab_size, max(sizes, default=-1) + 1), np.int64)
    counts[list(sizes)] = list(sizes.values())
    return counts


def _sizes(content: dict[str, Any], vocab: Any, path: Path) -> tuple[dict[int, int], list[int]]:
    """Return {id: number of bytes} for the vocabulary, and the ids of tokens with a leading
    space.
    """
    tokens: dict[str, int] = (
        vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
    )
    kinds = _kinds(content.get("decoder")) | _kinds(content.get("pre_tokenizer"))
    size: Callable[[str], int]
    if "ByteLevel" in kinds:
        space, size = "Ġ", len  # each character represents a byte
    elif content["model"]["type"] == "WordPiece":
        prefix = content["model"].get("continuing_subword_prefix", "##")

        def size(token: str) -> int:
            is_part = token.startswith(prefix)
            return len(token.encode()) - len(prefix) if is_part else 1 + len(token.encode())

        starts = [number for token, number in tokens.items() if not token.startswith(prefix)]
        return {number: size(token) for token, number in tokens.items()}, starts
    elif "Metaspace" in kinds or WORD_START in str(content.get("decoder")):
        space, fallback = WORD_START, bool(content["model"].get("byte_fallback"))

        def size(token: str) -> int:
            is_byte = fallback and BYTE_TOKEN.fullmatch(token)
            return 1 if is_byte else len(token.replace(WORD_START, " ").encode())
    else:
        raise ConfigError(
            f"{path}: with its decoder, single tokens have no text of their own. Use a byte-level, "
            "sentencepiece or WordPiece tokenizer."
        )
    sizes = {number: size(token) for token, number in tokens.items()}
    return sizes, [number for token, number in tokens.items() if token.startswith(space)]


def _kinds(component: Any) -> set[str]:
    """Return the types of a component in tokenizer.json and of all components nested in it."""
    if not isinstance(component, dict):
        return set()
    parts = [*component.get("decoders", []), *component.get("pretokenizers", [])]
    return {component["type"]}.union(*map(_kinds, parts))


def _notice(
    table: TokenBytes, encode: Callable[[str], np.ndarray], backend: Any, content: dict[str, Any]
) -> str:
    """Return how the table's byte counts differ from those of the probe texts and their decoded
    ids.
    """
    counted = original = decoded = 0
    for text in PROBES:
        ids = encode(text)
        counted += table.of(ids)
        original += len(text.encode())
        decoded += len(backend.decode(ids.tolist(), skip_special_tokens=False).encode())
    normalizer = content.get("normalizer")
    if counted == original:
        return ""
    if counted == decoded:
        why = " its normalizer changes texts, so" if normalizer else ""
        return f"{why} bytes are those of the text after encoding and decoding".strip()
    return (
        "bytes are summed over single tokens: the tokenizer does not reproduce the text that it "
        f"encodes (the tokens of {original} bytes of text have {counted} bytes)"
    )
