"""Loads a tokenizer, and saves a copy next to the token shards.

A tokenizer is a Hugging Face directory, a Hugging Face hub id, or `tiktoken:<encoding>`. The copy
is `tokenizer.json` (for the Rust library `tokenizers`), `tiktoken.json` with its ranks, or the
files that transformers saves for a tokenizer implemented in Python. Documents are encoded only
with the saved copy, so shards and copy cannot disagree. Independent of documents.
"""

import base64
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from data_prep.tokenizer.backends import load_tokenizer_json
from data_prep.tokenizer.vocabulary import read_definition
from zerolm.common.errors import ConfigError, did_you_mean, reason
from zerolm.common.files import file_entry, write_json
from zerolm.shards.tokenizer import (
    TIKTOKEN_FILE,
    TIKTOKEN_RANKS,
    load_auto_tokenizer,
    make_portable,
    read_tiktoken,
    without_marks,
)

TIKTOKEN_EOS = "<|endoftext|>"
TIKTOKEN_PREFIX = "tiktoken:"

# Keys of tokenizer_config.json that cannot change ids. Any other key requires transformers.
_SPECIAL_TOKEN_KEYS = {"bos_token", "eos_token", "pad_token", "unk_token"}
_INERT_KEYS = {
    "add_bos_token",
    "add_eos_token",
    "backend",
    "clean_up_tokenization_spaces",
    "is_local",
    "local_files_only",
    "model_max_length",
    "tokenizer_class",
}
MAX_GROWTH = 1000  # Unicode normalization expands a character to at most 18 characters
_PLAIN_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
_PLAIN_FILES = {"tokenizer.json", "tokenizer_config.json"}
_MAX_PLAIN_VOCAB = 100_000  # above this size, transformers may patch Mistral's split pattern


@dataclass(frozen=True)
class Tokenizer:
    """The properties of a tokenizer that are needed for tokenization.

    Attributes:
        name: the value of --tokenizer.
        vocab_size: greater than every id; `len()` of a transformers tokenizer, or more if the ids
            have gaps.
        bos_id: None if the tokenizer has no BOS token, or if it is the EOS token.
        fingerprint: hex SHA-256 of everything that determines the ids.
        save: function that writes a copy of the tokenizer into an existing directory.
    """

    name: str
    vocab_size: int
    eos_id: int
    fingerprint: str
    save: Callable[[Path], object]
    notices: tuple[str, ...] = ()
    bos_id: int | None = None

    def write_copy(self, directory: Path) -> dict[str, Any]:
        """Write a copy of the tokenizer to a new directory, and return its manifest entry."""
        directory.mkdir()
        self.save(directory)
        make_portable(directory)
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        files = [file_entry(path, directory) for path in paths]
        return {"name": self.name, "fingerprint": self.fingerprint, "files": files}


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer directory, hub id or `tiktoken:<encoding>`."""
    if name.startswith(TIKTOKEN_PREFIX):
        return _describe_tiktoken(name, _get_encoding(name))
    directory = Path(name)
    if directory.is_dir():
        if (directory / TIKTOKEN_FILE).is_file():
            return _describe_tiktoken(name, read_tiktoken(directory))
        plain = without_marks(directory)
        found = _load_without_transformers(plain) or _load_with_transformers(str(plain), local=True)
        return replace(found, name=name)
    if directory.exists():
        raise ConfigError(f"--tokenizer {name}: is a file. Give its directory.")
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"--tokenizer {name}: no such directory. Check the path.")
    return _load_with_transformers(name, local=False)


def _load_without_transformers(directory: Path) -> Tokenizer | None:
    """Load a directory without transformers, whose import takes 2 s; return None if transformers is
    required.

    transformers is not required if it would run tokenizer.json unchanged: the tokenizer class has
    no code of its own, no configuration key adds or changes tokens, and there are no other files.
    """
    config_path, backend_path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not (config_path.is_file() and backend_path.is_file()):
        return None
    others = ["special_tokens_map.json", "added_tokens.json", "config.json"]
    if any((directory / name).exists() for name in others):
        return None
    try:
        config = json.loads(config_path.read_text(encoding="utf-8-sig"))
        added = read_definition(directory)["added_tokens"]
        special = {token["content"]: token for token in added}
        is_plain = config.get("tokenizer_class") in _PLAIN_CLASSES
        is_plain = is_plain and set(config) <= _SPECIAL_TOKEN_KEYS | _INERT_KEYS
        named = [config[key] for key in _SPECIAL_TOKEN_KEYS & set(config)]
        is_plain = is_plain and all(
            isinstance(token, str) and special.get(token, {}).get("special") for token in named
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # transformers reports the problem
    if not is_plain or "eos_token" not in config:
        return None
    try:
        backend = load_tokenizer_json(backend_path)
    except Exception:  # the library raises a plain Exception; transformers will report the problem
        return None
    eos_id = backend.token_to_id(config["eos_token"])
    if eos_id is None or backend.get_vocab_size() > _MAX_PLAIN_VOCAB:
        return None
    described = _describe_backend(
        str(directory),
        eos_id,
        backend.get_vocab_size(),
        _definition_of(backend, directory),
        lambda target: [shutil.copyfile(directory / file, target / file) for file in _PLAIN_FILES],
    )
    bos_token = config.get("bos_token")
    return _with_bos(described, None if bos_token is None else backend.token_to_id(bos_token))


def _load_with_transformers(name: str, local: bool) -> Tokenizer:
    notices: list[str] = []
    tokenizer = load_auto_tokenizer(name, local, notices)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"--tokenizer {name}: has no EOS token, which must end every document. Set eos_token "
            f"in its tokenizer_config.json."
        )
    if local:
        _check_eos_token(Path(name), tokenizer.eos_token)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        described = _describe_backend(
            name,
            tokenizer.eos_token_id,
            len(tokenizer),
            orjson.loads(backend.to_str()),
            tokenizer.save_pretrained,
            tuple(notices),
        )
        return _with_bos(described, tokenizer.bos_token_id)
    vocab = tokenizer.get_vocab()
    definition = [type(tokenizer).__name__, sorted(vocab.items()), tokenizer.eos_token_id]
    described = Tokenizer(
        name,
        max(len(tokenizer), max(vocab.values()) + 1),
        tokenizer.eos_token_id,
        _fingerprint(definition),
        tokenizer.save_pretrained,
    )
    return _with_bos(described, tokenizer.bos_token_id)


def _with_bos(tokenizer: Tokenizer, bos_id: int | None) -> Tokenizer:
    return replace(tokenizer, bos_id=None if bos_id == tokenizer.eos_id else bos_id)


def require_bos(tokenizer: Tokenizer, option: str = "--bos") -> None:
    """Raise a `ConfigError` if a tokenizer has no BOS token to begin documents with."""
    if tokenizer.bos_id is None:
        raise ConfigError(
            f"{option}: the tokenizer {tokenizer.name} has no BOS token, or its BOS is its EOS "
            "token, which separates documents already. Remove the option, or set bos_token in its "
            "tokenizer_config.json."
        )


def _check_eos_token(directory: Path, eos_token: str) -> None:
    """Check that the vocabulary contains the EOS token; if not, transformers would add it with a
    new id.
    """
    if not (directory / "tokenizer.json").is_file():
        return
    backend = load_tokenizer_json(directory / "tokenizer.json")
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    for file in ("tokenizer_config.json", "added_tokens.json"):
        if (directory / file).is_file():
            content = json.loads((directory / file).read_text(encoding="utf-8-sig"))
            if file == "added_tokens.json":
                special |= set(content)
            else:
                decoder = content.get("added_tokens_decoder") or {}
                special |= {token["content"] for token in decoder.values()}
    if eos_token not in special and backend.token_to_id(eos_token) is None:
        raise ConfigError(
            f"--tokenizer {directory}: its eos_token {eos_token!r} is not in its vocabulary, and "
            f"would be added with a new id.{did_you_mean(eos_token, special)} Correct eos_token in "
            f"tokenizer_config.json or special_tokens_map.json, or add it to tokenizer.json."
        )


def _definition_of(backend: Any, directory: Path) -> dict[str, Any]:
    """Return a backend's definition as `tokenizers` would serialize it.

    It usually equals the contents of tokenizer.json, which are then read instead.
    """
    if backend.to_str(pretty=True).encode() == (directory / "tokenizer.json").read_bytes():
        return read_definition(directory)
    return orjson.loads(backend.to_str())


def _describe_backend(
    name: str,
    eos_id: int,
    length: int,
    content: dict[str, Any],
    save: Callable[[Path], object],
    notices: tuple[str, ...] = (),
) -> Tokenizer:
    if dropout := content["model"].get("dropout"):
        raise ConfigError(
            f"--tokenizer {name}: tokenizer.json: model.dropout is {dropout}, so the same text "
            "gets different ids each time. Set it to null."
        )
    if (growth := _growth(content["normalizer"])) > MAX_GROWTH:
        raise ConfigError(
            f"--tokenizer {name}: tokenizer.json: normalizer: replaces a character by up to "
            f"{growth:,}, more than {MAX_GROWTH:,}, so one document could fill all memory. "
            "Correct it."
        )
    keys = ("added_tokens", "normalizer", "pre_tokenizer", "model")
    definition = [*(content[key] for key in keys), eos_id]
    vocab = content["model"]["vocab"]  # for Unigram, a list of (token, score) in id order
    largest = max(vocab.values(), default=0) if isinstance(vocab, dict) else len(vocab) - 1
    largest = max([largest, *(token["id"] for token in content["added_tokens"])])
    # If the ids have gaps, the largest id may be equal to or greater than the length.
    vocab_size = max(length, largest + 1)
    return Tokenizer(name, vocab_size, eos_id, _fingerprint(definition), save, notices)


def _growth(normalizer: Any) -> int:
    """Return the maximum number of characters that a normalizer may produce from one character."""
    if not isinstance(normalizer, dict):
        return 1
    own = max((len(normalizer.get(key) or "") for key in ("content", "prepend")), default=0)
    parts = map(_growth, normalizer.get("normalizers") or ())
    return max(1, own) * math.prod(parts)


def _fingerprint(definition: Any) -> str:
    """Return the SHA-256 of a definition, serialized as ASCII JSON with sorted keys."""
    canonical = json.dumps(definition, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _get_encoding(name: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer {name}: the package tiktoken is not installed. Run: pip install tiktoken"
        ) from error
    encoding = name.removeprefix(TIKTOKEN_PREFIX)
    print(
        (f"{name}: tiktoken downloads its ranks, unless they are cached"),
        file=sys.stderr,
        flush=True,
    )
    try:
        return tiktoken.get_encoding(encoding)
    except Exception as error:  # ValueError: unknown name; other errors: failed downloads
        known = ", ".join(tiktoken.list_encoding_names())
        raise ConfigError(
            f"--tokenizer {name}: cannot be loaded ({reason(error)}). Known encodings: {known}."
        ) from error


def _describe_tiktoken(name: str, encoding: Any) -> Tokenizer:
    if TIKTOKEN_EOS not in encoding._special_tokens:
        raise ConfigError(
            f"--tokenizer {name}: has no {TIKTOKEN_EOS} token, which must end every document. "
            f"Choose another encoding."
        )
    ranks = sorted((rank, token.hex()) for token, rank in encoding._mergeable_ranks.items())
    definition = [encoding._pat_str, ranks, sorted(encoding._special_tokens.items())]

    def save(directory: Path) -> None:
        lines = [
            base64.b64encode(token) + b" %d\n" % rank
            for token, rank in encoding._mergeable_ranks.items()
        ]
        (directory / TIKTOKEN_RANKS).write_bytes(b"".join(lines))
        content = {
            "name": encoding.name,
            "pat_str": encoding._pat_str,
            "special_tokens": dict(encoding._special_tokens),
        }
        write_json(directory / TIKTOKEN_FILE, content)

    return Tokenizer(name, encoding.n_vocab, encoding.eot_token, _fingerprint(definition), save)
