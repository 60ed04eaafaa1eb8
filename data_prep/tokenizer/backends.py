"""Encoding backends: six libraries behind one call, each made from a tokenizer's copy.

`open_backend(name, directory)` is the only place that knows how a library is loaded and called.
What it returns encodes texts as ordinary text: no special tokens are added, those spelled out in
the text are not looked for (a document that spells out the EOS token does not end there), nothing
is truncated or padded. It uses the calling thread, or one thread that the calling one waits for.
Whether two backends give the same ids is not known here; `data_prep/equality.py` finds out.

gigatoken and fastokens are young: optional (`pip install zerolm[fast-tokenizers]`) and never the
only way.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from data_prep.tokenizer_files import byte_of_character, without_special_tokens
from zerolm.errors import ConfigError
from zerolm.tokenizer_copy import TIKTOKEN_FILE, TIKTOKEN_RANKS, auto_tokenizer, read_encoding

# Fastest first, as measured on one core (benchmarks/results/tokenize_speed.md).
FAST_BACKENDS = ("gigatoken", "fastokens", "tiktoken")
BACKENDS = (*FAST_BACKENDS, "tokenizers", "transformers")
ID_FILES = ("tokenizer.json", TIKTOKEN_FILE, TIKTOKEN_RANKS)  # of a copy: what decides its ids
EXTRAS = {"gigatoken": "fast-tokenizers", "fastokens": "fast-tokenizers", "tiktoken": "tiktoken"}

# (token ids of all texts (N,) uint32, where each text ends (D,) int64)
Ids = tuple[np.ndarray, np.ndarray]
Encode = Callable[[Sequence[str]], Ids]

# A panic of Rust is no `Exception`, so a library's failure is whatever it raises but for these.
NOT_FAILURES = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)

# What GPT-2 splits at, which the byte-level pre-tokenizer of `tokenizers` has built in.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


# gigatoken has patterns to split at by name only.
GIGATOKEN_SCHEMES = {
    "gpt2": "gpt2",
    "r50k_base": "gpt2",
    "p50k_base": "gpt2",
    "cl100k_base": "gpt4",
    "o200k_base": "o200k",
    "o200k_harmony": "o200k",
}


class BackendRefused(Exception):
    """A backend is not installed, or does not take this tokenizer; the message says why."""


class BackendFailed(Exception):
    """A backend could not encode some text; the message says why."""


def reference_backend(directory: Path) -> str:
    """Return the backend whose ids are by definition those of a tokenizer's copy."""
    if (directory / TIKTOKEN_FILE).is_file():
        return "tiktoken"
    return "tokenizers" if (directory / "tokenizer.json").is_file() else "transformers"


def installed_version(name: str) -> str | None:
    """Return the version of a backend's package, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def open_backend(name: str, directory: Path) -> Encode:
    """Load a backend for a tokenizer's copy; once in a process, as long as the copy is the same.

    What it returns raises `BackendFailed` for texts that it cannot encode.

    Raises:
        BackendRefused: it is not installed, or does not take this tokenizer.
        ConfigError: the copy itself cannot be loaded.
    """
    if installed_version(name) is None:
        extra = EXTRAS.get(name, name)
        raise BackendRefused(f"is not installed (pip install 'zerolm[{extra}]')")
    copy = [directory / file for file in ID_FILES]
    states = [each.stat() for each in copy if each.is_file()]
    return _open(name, directory, tuple((each.st_mtime_ns, each.st_size) for each in states))


@lru_cache(maxsize=4)
def _open(name: str, directory: Path, _: tuple[tuple[int, int], ...]) -> Encode:
    if name == reference_backend(directory):
        return _guarded(_REFERENCES[name](directory))
    if name == "transformers":
        return _guarded(_transformers(directory))
    try:
        return _guarded(_FAST[name](directory))
    except (BackendRefused, ConfigError):
        raise
    except KeyError as error:
        raise BackendRefused(f"does not take this kind of tokenizer (no {error})") from error
    except BaseException as error:
        if isinstance(error, NOT_FAILURES):
            raise
        raise BackendRefused(f"does not take this tokenizer ({_plainly(error)})") from error


def _guarded(encode: Encode) -> Encode:
    def guarded(texts: Sequence[str]) -> Ids:
        try:
            return encode(texts)
        except BaseException as error:
            if isinstance(error, NOT_FAILURES):
                raise
            raise BackendFailed(_plainly(error)) from error

    return guarded


def _plainly(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:200] or type(error).__name__


def flatten(lists: Sequence[Any]) -> Ids:
    """Put the ids of documents one after another."""
    ends = np.cumsum([len(ids) for ids in lists], dtype=np.int64)
    if not len(lists) or not ends[-1]:
        return np.empty(0, np.uint32), ends
    return np.concatenate([np.asarray(ids, np.uint32) for ids in lists]), ends


def library_tokenizer(path: Path) -> Any:
    """Return what the library `tokenizers` makes of a tokenizer.json.

    The last one is kept, for another file with the same content: a copy.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    content = path.read_bytes()
    digest = hashlib.sha256(content).digest()
    if digest not in _LAST:
        _LAST.clear()
        _LAST[digest] = tokenizers.Tokenizer.from_buffer(content)
    return _LAST[digest]


_LAST: dict[bytes, Any] = {}


def _tokenizers(directory: Path) -> Encode:
    backend = library_tokenizer(directory / "tokenizer.json")
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> Ids:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return flatten([encoding.ids for encoding in encodings])

    return encode


def _tiktoken(directory: Path) -> Encode:
    return _run_tiktoken(read_encoding(directory))


def _run_tiktoken(encoding: Any) -> Encode:
    return lambda texts: flatten(
        [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
    )


def _transformers(directory: Path) -> Encode:
    tokenizer = auto_tokenizer(str(directory), local=True)

    def encode(texts: Sequence[str]) -> Ids:
        return flatten(
            [
                tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                for text in texts
            ]
        )

    return encode


def _gigatoken(directory: Path) -> Encode:
    from gigatoken.gigatoken_rs import BPETokenizer, load_hf_json

    if (directory / TIKTOKEN_FILE).is_file():
        name = json.loads((directory / TIKTOKEN_FILE).read_bytes())["name"]
        scheme = GIGATOKEN_SCHEMES[name]
        backend: Any = BPETokenizer.from_tiktoken(directory / TIKTOKEN_RANKS, scheme, {})
    else:
        backend = load_hf_json(orjson.dumps(without_special_tokens(directory)))
    # One document a call: the arrays that a batch returns cost 0.5 s of imports in each worker.
    return lambda texts: flatten([backend.encode(text) for text in texts])


def _fastokens(directory: Path) -> Encode:
    # Its flat output runs on a pool of threads, one a core unless this is set before the first use.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    import fastokens

    if (directory / TIKTOKEN_FILE).is_file():
        pattern = json.loads((directory / TIKTOKEN_FILE).read_bytes())["pat_str"]
        backend = fastokens.Tokenizer.from_tiktoken(
            str(directory / TIKTOKEN_RANKS), pattern=pattern, special_tokens={}
        )
    else:
        content = orjson.dumps(without_special_tokens(directory))
        backend = fastokens.Tokenizer.from_json_str(content.decode())
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: Sequence[str]) -> Ids:
        ids, offsets = backend.encode_batch_flat(list(texts), False, True)
        ends = np.frombuffer(offsets, np.uint64).astype(np.int64)[1:]
        return np.frombuffer(ids, np.uint32), ends

    return encode


def _tiktoken_of_json(directory: Path) -> Encode:
    """Run byte-level BPE of a tokenizer.json by tiktoken, whose ranks are the order of merges."""
    content = without_special_tokens(directory)
    if content["normalizer"] is not None or content["added_tokens"]:
        raise BackendRefused("has no normalizers and no added tokens that are not special")
    model = content["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise BackendRefused("takes byte-level BPE only")
    if model.get("ignore_merges") or model.get("continuing_subword_prefix"):
        raise BackendRefused("has no prefixes of inner subwords and no words that skip merging")
    import tiktoken

    byte_of = byte_of_character()
    special = {each["content"] for each in json.loads(
        (directory / "tokenizer.json").read_bytes())["added_tokens"]}  # fmt: skip
    try:
        ranks = {
            bytes(byte_of[character] for character in token): rank
            for token, rank in model["vocab"].items()
            if token not in special
        }
    except KeyError as error:
        raise BackendRefused("takes byte-level BPE only") from error
    encoding = tiktoken.Encoding(
        "copy", pat_str=_split_pattern(content["pre_tokenizer"]), mergeable_ranks=ranks,
        special_tokens={},
    )  # fmt: skip
    return _run_tiktoken(encoding)


def _split_pattern(pre_tokenizer: dict[str, Any]) -> str:
    steps = [pre_tokenizer]
    if pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    last = steps[-1]
    if last["type"] == "ByteLevel" and not last["add_prefix_space"]:
        if len(steps) == 1 and last["use_regex"]:
            return GPT2_PATTERN
        if len(steps) == 2 and not last["use_regex"] and steps[0]["type"] == "Split":
            first = steps[0]
            if first["behavior"] == "Isolated" and not first["invert"]:
                return first["pattern"]["Regex"]
    raise BackendRefused("takes one pattern to split at, and no prefix space")


_REFERENCES: dict[str, Callable[[Path], Encode]] = {
    "tokenizers": _tokenizers,
    "tiktoken": _tiktoken,
    "transformers": _transformers,
}
_FAST: dict[str, Callable[[Path], Encode]] = {
    "gigatoken": _gigatoken,
    "fastokens": _fastokens,
    "tiktoken": _tiktoken_of_json,
}
