"""Encoding libraries ("backends") with a common interface; each loads a tokenizer's saved copy.

Only `open_backend(name, directory)` loads the libraries. The function it returns encodes ordinary
text: it adds no special tokens, encodes special tokens spelled out in a text as text (so a
document that spells the EOS token does not end there), and does not truncate or pad. It runs in
the calling thread, or in one thread that the caller waits for. `data_prep.tokenizer.equivalence`
checks whether two backends produce the same ids.

gigatoken is young, so it is optional (`bash launch/setup.sh fast-tokenizers`) and another backend
is always available.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from data_prep.tokenizer.vocabulary import (
    read_without_special_tokens,
)
from zerolm.common.errors import ConfigError, reason
from zerolm.common.provenance import installed_version
from zerolm.shards.tokenizer import (
    TIKTOKEN_FILE,
    TIKTOKEN_RANKS,
    load_auto_tokenizer,
    read_tiktoken,
)

FAST_BACKEND = "gigatoken"
BACKENDS = (FAST_BACKEND, "tiktoken", "tokenizers", "transformers")
ID_FILES = ("tokenizer.json", TIKTOKEN_FILE, TIKTOKEN_RANKS)  # they determine the ids
EXTRAS = {FAST_BACKEND: "fast-tokenizers"}

Ids = list[np.ndarray]  # (N,) uint32 for each text
# Encodes texts given as str; backends in UTF8_BACKENDS also accept UTF-8 bytes.
Encode = Callable[[Sequence[Any]], Ids]
UTF8_BACKENDS = (FAST_BACKEND,)

# A Rust panic is not an `Exception`, so any error other than these counts as a library failure.
NOT_BACKEND_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)

# gigatoken selects split patterns only by name.
GIGATOKEN_SCHEMES = {
    "gpt2": "gpt2",
    "r50k_base": "gpt2",
    "p50k_base": "gpt2",
    "cl100k_base": "gpt4",
    "o200k_base": "o200k",
    "o200k_harmony": "o200k",
}


class BackendUnavailable(Exception):
    """A backend is not installed or does not support the tokenizer; the message states which."""


class BackendFailed(Exception):
    """A backend failed to encode a text; the message states the reason."""


def reference_backend(directory: Path) -> str:
    """Return the backend whose ids are correct by definition for a tokenizer's saved copy."""
    if (directory / TIKTOKEN_FILE).is_file():
        return "tiktoken"
    return "tokenizers" if (directory / "tokenizer.json").is_file() else "transformers"


def open_backend(name: str, directory: Path) -> Encode:
    """Load a backend for a tokenizer's saved copy; each process caches it until the copy changes.

    The returned function raises `BackendFailed` for texts that it cannot encode.

    Raises:
        BackendUnavailable: the backend is not installed or does not support this tokenizer.
    """
    if installed_version(name) is None:
        extra = EXTRAS.get(name, name)
        raise BackendUnavailable(f"is not installed (run: bash launch/setup.sh {extra})")
    paths = [directory / file for file in ID_FILES]
    stats = [path.stat() for path in paths if path.is_file()]
    return _open(name, directory, tuple((each.st_mtime_ns, each.st_size) for each in stats))


@lru_cache(maxsize=4)
def _open(name: str, directory: Path, _: tuple[tuple[int, int], ...]) -> Encode:
    if name == reference_backend(directory) or name == "transformers":
        return _raise_backend_failed(_REFERENCES[name](directory))
    if name != FAST_BACKEND:
        raise BackendUnavailable("does not support this kind of tokenizer")
    try:
        return _raise_backend_failed(_open_gigatoken(directory))
    except (BackendUnavailable, ConfigError):
        raise
    except KeyError as error:
        raise BackendUnavailable(f"does not support this kind of tokenizer (no {error})") from error
    except BaseException as error:
        if isinstance(error, NOT_BACKEND_ERRORS):
            raise
        why = reason(error, named=False)
        raise BackendUnavailable(f"does not support this tokenizer ({why})") from error


def _raise_backend_failed(encode: Encode) -> Encode:
    def encode_or_raise(texts: Sequence[str]) -> Ids:
        try:
            return encode(texts)
        except BaseException as error:
            if isinstance(error, NOT_BACKEND_ERRORS):
                raise
            raise BackendFailed(reason(error, named=False)) from error

    return encode_or_raise


def load_tokenizer_json(path: Path) -> Any:
    """Load a tokenizer.json with the library `tokenizers`.

    The last tokenizer is cached, so a copy of the same file is not loaded again.
    """
    return _load_content(path.read_bytes())


@lru_cache(maxsize=1)
def _load_content(content: bytes) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    return tokenizers.Tokenizer.from_buffer(content)


def _open_tokenizers(directory: Path) -> Encode:
    backend = load_tokenizer_json(directory / "tokenizer.json")
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> Ids:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    return encode


def _open_tiktoken(directory: Path) -> Encode:
    encoding = read_tiktoken(directory)
    return lambda texts: [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]


def _open_transformers(directory: Path) -> Encode:
    tokenizer = load_auto_tokenizer(str(directory), local=True)

    def encode_one(text: str) -> np.ndarray:
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return np.array(encoded["input_ids"], np.uint32)

    return lambda texts: [encode_one(text) for text in texts]


def _open_gigatoken(directory: Path) -> Encode:
    from gigatoken.gigatoken_rs import BPETokenizer, load_hf_json

    if (directory / TIKTOKEN_FILE).is_file():
        name = json.loads((directory / TIKTOKEN_FILE).read_bytes())["name"]
        scheme = GIGATOKEN_SCHEMES[name]
        backend: Any = BPETokenizer.from_tiktoken(directory / TIKTOKEN_RANKS, scheme, {})
    else:
        backend = load_hf_json(orjson.dumps(read_without_special_tokens(directory)))
    # One document per call, because batches return arrays that cost each worker 0.5 s of imports.
    # gigatoken encodes UTF-8, so non-ASCII texts are passed as the bytes that `Encoder` already
    # has.
    return lambda texts: [
        backend.encode(text if type(text) is bytes or text.isascii() else text.encode())
        for text in texts
    ]


_REFERENCES: dict[str, Callable[[Path], Encode]] = {
    "tokenizers": _open_tokenizers,
    "tiktoken": _open_tiktoken,
    "transformers": _open_transformers,
}
