"""Load the copy of the tokenizer that is stored with shards.

Imports the tokenizer libraries lazily.
"""

import atexit
import base64
import codecs
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError, reason
from zerolm.common.files import sha256_file, write_json
from zerolm.common.url import ask_hub
from zerolm.config.custom_code import tokenizer_problem

TOKENIZER_FILE = "tokenizer.json"
TIKTOKEN_FILE, TIKTOKEN_RANKS = "tiktoken.json", "ranks.tiktoken"
# Texts that some classes do not encode as tokenizer.json defines; short because they are printed.
EXAMPLES = ("don't", "The 2024", "a  b", "a\n\nb", " e\u0301", "ﬁ", "日本", "A\tB ", "<s>x", "")


def without_marks(directory: Path) -> Path:
    """Return a copy of a tokenizer directory without byte order marks, which the libraries reject.

    If no file has a mark, returns the directory itself. The copy is temporary: it contains links,
    and copies of files without their marks, until the process exits.
    """
    files = [path for path in directory.iterdir() if path.is_file()]
    marked = [path for path in files if path.suffix == ".json" and _starts_with_mark(path)]
    if not marked:
        return directory
    copy = Path(tempfile.mkdtemp(prefix="zerolm-tokenizer-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for path in files:
        if path in marked:
            (copy / path.name).write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
        else:
            (copy / path.name).symlink_to(path.resolve())
    return copy


def load_backend(path: Path) -> Any:
    """Load a tokenizer.json, with or without a byte order mark."""
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))


def _starts_with_mark(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def load_auto_tokenizer(name: str, local: bool, notices: list[str] | None = None) -> Any:
    """Load a tokenizer with transformers, without executing any code that comes with it.

    The file tokenizer.json defines how text is encoded. transformers rebuilds some tokenizer
    classes from the vocabulary alone; from such a class only the special tokens are used.

    Args:
        name: a directory or a Hugging Face hub id.
        notices: list to which a notice is added if the class differs from tokenizer.json.
    """
    if local and (problem := tokenizer_problem(Path(name))):
        raise ConfigError(problem)
    if local and Path(name).is_dir():
        name = str(without_marks(Path(name)))
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    absent = None if local else ask_hub(name)
    is_local = local or absent is not None
    try:
        of_class = AutoTokenizer.from_pretrained(
            name, local_files_only=is_local, trust_remote_code=False
        )
        found = cached_file(
            name,
            TOKENIZER_FILE,
            local_files_only=is_local,
            _raise_exceptions_for_missing_entries=False,
        )
        if found is None or type(of_class) is PreTrainedTokenizerFast:
            return of_class
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            name, local_files_only=is_local, trust_remote_code=False
        )
    except Exception as error:  # OSError, ValueError, KeyError, ImportError, bare Exception
        if "trust_remote_code" in str(error):  # a hub id whose files are not in the local cache
            raise ConfigError(
                f"--tokenizer {name}: needs its own Python code, which is never executed. Choose a "
                "tokenizer that transformers has a class for, or one with tokenizer.json."
            ) from error
        where = "directory" if local else "directory, nor a hub id that can be loaded"
        raise ConfigError(
            f"--tokenizer {name}: not a tokenizer {where} ({absent or reason(error)}). Give a "
            f"directory with tokenizer.json, a hub id, or tiktoken:<encoding>."
        ) from error
    for key, token in of_class.special_tokens_map.items():
        if getattr(tokenizer, key, "") is None and str(token) in tokenizer.get_vocab():
            setattr(tokenizer, key, token)
    if notices is not None and (difference := _class_difference(of_class, tokenizer)):
        notices.append(
            f"{name}: AutoTokenizer loads it as {type(of_class).__name__}, which {difference}. "
            "tokenizer.json is used; use PreTrainedTokenizerFast to load it elsewhere"
        )
    return tokenizer


def _class_difference(of_class: Any, tokenizer: Any) -> str:
    """Return how a tokenizer class differs from tokenizer.json, as text; empty if it does not
    differ.
    """
    if getattr(of_class, "backend_tokenizer", None) is None:
        return "does not read tokenizer.json"
    theirs, ours = (
        json.loads(each.backend_tokenizer.to_str(pretty=False)) for each in (of_class, tokenizer)
    )
    for model in (theirs["model"], ours["model"]):  # absent, "" and false are equivalent
        model |= {key: None for key, value in model.items() if not value}
    parts = [
        key
        for key in ("normalizer", "pre_tokenizer", "model", "decoder")
        if theirs[key] != ours[key]
    ]
    added = [token["content"] for token in ours["added_tokens"] if not token["special"]]
    for text in (*EXAMPLES, *(f"a {token} b" for token in added)):
        found = [_ordinary_ids(each, text) for each in (of_class, tokenizer)]
        if found[0] != found[1]:
            what = ", ".join(parts) or "added_tokens"
            return (
                f"replaces its {what}: {text!r} is {found[0]}, but {found[1]} with tokenizer.json"
            )
    return f"replaces its {', '.join(parts)}, with equal ids for the texts tried" if parts else ""


def _ordinary_ids(tokenizer: Any, text: str) -> list[int] | str:
    try:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception if there is no unknown token
        return f"an error ({error})"


def make_portable(directory: Path) -> None:
    """Make every version of transformers load a tokenizer copy as its tokenizer.json defines it,
    and remove truncation and padding, which a call with `truncation=True` leaves in a saved file:
    programs that read it with tokenizers would cut or pad every text.

    Version 4 supports neither the class TokenizersBackend nor a list of `extra_special_tokens`, and
    it overrides the pre-tokenizer's `add_prefix_space`, by default with false. If there is no
    post-processor, no special tokens are added to text; llama.cpp would add a BOS with its default
    id, which is an ordinary token here.
    """
    path, file = directory / "tokenizer_config.json", directory / TOKENIZER_FILE
    if not file.is_file():
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("truncation") or content.get("padding"):
        write_json(file, content | {"truncation": None, "padding": None})
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    changed = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(changed.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    if (prefix := (content.get("pre_tokenizer") or {}).get("add_prefix_space")) is not None:
        changed["add_prefix_space"] = prefix
    if content.get("post_processor") is None:
        changed = {"add_bos_token": False, "add_eos_token": False, **changed}
    if changed != config:
        write_json(path, changed)


def copy_problems(directory: Path, files: Sequence[dict[str, Any]]) -> list[str]:
    """Return a problem for each difference between a tokenizer copy and the files in the manifest.

    Args:
        files: `file` and `sha256` of each file; empty if the manifest lists none.
    """
    problems = []
    for entry in files:
        path = directory / entry["file"]
        if not path.is_file():
            problems.append(f"{path}: the manifest lists it, but it is missing. Restore it.")
        elif (actual := sha256_file(path)) != entry["sha256"]:
            problems.append(
                f"{path}: SHA-256 {actual}, but the manifest says {entry['sha256']}. The file is "
                "damaged: restore it, or tokenize again."
            )
    listed = {entry["file"] for entry in files}
    found = (path.relative_to(directory) for path in sorted(directory.rglob("*")) if path.is_file())
    for name in found if listed else ():
        if name.as_posix() not in listed and not name.name.startswith("."):
            problems.append(
                f"{directory / name}: is not in the manifest, so the ids were made without it. "
                f"Remove it."
            )
    return problems


def gives_equal_ids(one: Path, other: Path) -> bool:
    """Return whether the tokenizers in two directories encode ordinary text to the same ids.

    Special tokens may differ, because they are never encoded from text.
    """
    return _definition(one) == _definition(other)


def _definition(directory: Path) -> Any:
    """Return the parts of a tokenizer that determine the ids of ordinary text."""
    if (directory / TIKTOKEN_FILE).is_file():
        encoding = read_tiktoken(directory)
        return encoding._pat_str, encoding._mergeable_ranks
    path = directory / "tokenizer.json"
    if not path.is_file():
        files = sorted(directory.glob("*")) if directory.is_dir() else []
        names = [each for each in files if each.suffix in (".model", ".txt", ".json")]
        return {each.name: sha256_file(each) for each in names if "tokenizer" in each.name}
    try:
        content = json.loads(load_backend(path).to_str())
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"{path}: cannot be read ({error}). Restore it.") from None
    added = [token for token in content["added_tokens"] if not token["special"]]
    return [added, *(content[key] for key in ("normalizer", "pre_tokenizer", "model"))]


def read_tiktoken(directory: Path) -> Any:
    """Load a tiktoken encoding from a tokenizer directory."""
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(
            f"{directory}: the package tiktoken is not installed. Run: pip install tiktoken"
        ) from error
    content = json.loads((directory / TIKTOKEN_FILE).read_text(encoding="utf-8"))
    ranks = {}
    for line in (directory / TIKTOKEN_RANKS).read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(**content, mergeable_ranks=ranks)
