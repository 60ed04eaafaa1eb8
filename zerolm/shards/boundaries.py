"""What stands between documents: in token shards, and in texts that their tokenizer encodes.

Shards have an EOS id after each document, and with `tokenize --bos` a BOS id before it. A
tokenizer may add other ids to a text by a template of its own. Imports tokenizer libraries lazily.
"""

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.common.errors import ConfigError, ShardError
from zerolm.shards.reader import Source
from zerolm.shards.tokenizer import (
    TIKTOKEN_FILE,
    TOKENIZER_FILE,
    load_auto_tokenizer,
    load_backend,
    read_tiktoken,
)

PROBES = ("a", "0", ".")  # a tokenizer may encode one of them to no id


class Template(NamedTuple):
    """The ids that a tokenizer puts around a text."""

    before: list[int]
    after: list[int]


def template_of(encode: Callable[[str, bool], list[int]]) -> Template:
    """Return a tokenizer's template, given a function that encodes with or without it."""
    for text in PROBES:
        inner, whole = encode(text, False), encode(text, True)
        for start in range(len(whole) - len(inner) + 1) if inner else ():
            if whole[start : start + len(inner)] == inner:
                return Template(whole[:start], whole[start + len(inner) :])
    return Template([], [])


class Boundaries(NamedTuple):
    """A tokenizer's template, its EOS id, and a function that shows an id as text."""

    template: Template
    eos_id: int | None
    shown: Callable[[int], str]


def read_boundaries(directory: Path, load: Callable[[Path], Any] = load_backend) -> Boundaries:
    """Read the template of the tokenizer in a directory.

    Args:
        load: loads a tokenizer.json, such as a function that has loaded the same file before.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
    """
    if (directory / TIKTOKEN_FILE).is_file():
        encoding = read_tiktoken(directory)
        names = {number: token for token, number in encoding._special_tokens.items()}
        return Boundaries(Template([], []), encoding.eot_token, _shown(names.get))
    if not (directory / TOKENIZER_FILE).is_file():
        tokenizer = load_auto_tokenizer(str(directory), local=True)
        return Boundaries(
            template_of(lambda text, adds: tokenizer.encode(text, add_special_tokens=adds)),
            tokenizer.eos_token_id,
            _shown(tokenizer.convert_ids_to_tokens),
        )
    try:
        backend = load(directory / TOKENIZER_FILE)
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{directory / TOKENIZER_FILE}: cannot be read ({error}).") from None
    backend.no_truncation()
    backend.no_padding()
    template = template_of(lambda text, adds: backend.encode(text, add_special_tokens=adds).ids)
    token = _config(directory).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    eos_id = backend.token_to_id(token) if token else None
    return Boundaries(template, eos_id, _shown(backend.id_to_token))


def _config(directory: Path) -> dict:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    return json.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))


def _shown(name: Callable[[int], object]) -> Callable[[int], str]:
    return lambda number: f"{name(number)} (id {number})"


def described(source: Source, known: Boundaries) -> str:
    """Return what is between a source's documents, and what its tokenizer itself would add."""
    shown = known.shown
    begins = "" if source.bos_id is None else f"{shown(source.bos_id)} before and "
    text = f"{begins}{shown(source.eos_id)} after each document; the tokenizer itself would add "
    parts = [
        f"{' '.join(map(shown, ids))} {where} a text"
        for ids, where in zip(known.template, ("before", "after"), strict=True)
        if ids
    ]
    return text + (" and ".join(parts) or "nothing")


def notices(source: Source, known: Boundaries | None = None) -> list[str]:
    """Return a line for each difference between a source's documents and what its tokenizer adds.

    Returns nothing if there is no tokenizer, or if it is damaged, which other checks report.

    Args:
        known: of the source's tokenizer, if it has been read.
    """
    try:
        directory = source.tokenizer_directory()
        if not directory.is_dir():
            return []
        (before, after), eos_id, shown = known or read_boundaries(directory)
    except (ConfigError, ShardError):
        return []
    name, lines = source.directory, []
    if before != ([] if source.bos_id is None else [source.bos_id]):
        added = " ".join(map(shown, before))
        if source.bos_id is None:
            lines.append(
                f"{name}: documents do not begin with a BOS, but the tokenizer puts {added} before "
                "each text, also for readers of the exported model: it is not trained. Tokenize "
                "with --bos, or remove it from the tokenizer's template"
            )
        else:
            lines.append(
                f"{name}: documents begin with {shown(source.bos_id)}, but the tokenizer puts "
                f"{added or 'nothing'} before a text, also for readers of the exported model. "
                "Change the tokenizer's template, or tokenize without --bos"
            )
    if after:
        lines.append(
            f"{name}: the tokenizer puts {' '.join(map(shown, after))} after each text, also after "
            "a prompt for readers of the exported model. It is left out of prompts and tasks here; "
            "remove it from the tokenizer's template"
        )
    if eos_id is not None and eos_id != source.eos_id:
        lines.append(
            f"{name}: documents end with {shown(source.eos_id)}, but the tokenizer's EOS is "
            f"{shown(eos_id)}, which readers of the exported model wait for. Tokenize again"
        )
    return lines
