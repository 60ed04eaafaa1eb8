"""Runs llama.cpp's converter to GGUF for a model with a tokenizer from `train-tokenizer`.

llama.cpp splits text with its own code, selected by a name in the GGUF file. Its converter finds
the name by comparing a text's ids with the ids from published tokenizers, and refuses all other
tokenizers. This module derives the name from the split pattern in tokenizer.json instead. It must
not import the converter, which belongs to the user, before it is called.
"""

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.tokenizer.bpe import split_pattern
from zerolm.common.errors import ConfigError, reason
from zerolm.common.records import read_json

# Names in llama.cpp (src/llama-vocab.cpp) whose code splits like each pattern. docs/readers.md
# compares the ids: `gpt-4o` differs on some texts.
PRE_TOKENIZERS = {
    split_pattern("gpt2"): "gpt-2",
    split_pattern("llama3"): "llama-bpe",
    split_pattern("llama3", "1"): "qwen2",
    split_pattern("o200k"): "gpt-4o",
}


def pre_tokenizer(model: Path) -> str:
    """Return llama.cpp's name for the split pattern of a model's tokenizer.

    Raises:
        ConfigError: llama.cpp has no code for this split.
    """
    path = model / "tokenizer.json"
    definition = read_json(path, "the directory of an exported model")
    found = definition.get("pre_tokenizer") or {}
    parts = found.get("pretokenizers", [found])
    patterns = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    if not patterns and any(p.get("type") == "ByteLevel" and p.get("use_regex") for p in parts):
        patterns = [split_pattern("gpt2")]
    if len(patterns) != 1 or patterns[0] not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{path}: pre_tokenizer: {json.dumps(patterns)}: llama.cpp has no code for this "
            "split. Train the tokenizer with --split gpt2, llama3 or o200k and the default "
            "--digits (or llama3 with --digits 1), or call the converter directly for a "
            "published tokenizer."
        )
    return PRE_TOKENIZERS[patterns[0]]


def convert(converter: Path, model: Path, arguments: Sequence[str]) -> None:
    """Run the converter in this process, with the name of the split replaced."""
    name = pre_tokenizer(model)
    if not converter.is_file():
        raise ConfigError(
            f"{converter}: no such file. Name convert_hf_to_gguf.py in a llama.cpp checkout."
        )
    sys.path.insert(0, str(converter.parent))
    sys.argv = [str(converter), str(model), *arguments]
    try:
        _run(converter, name)
    except ImportError as error:  # it imports some packages when loaded, others in main()
        raise ConfigError(
            f"{converter}: needs the package {error.name}: {reason(error)}. Install it."
        ) from None


def _run(converter: Path, name: str) -> None:
    namespace = runpy.run_path(str(converter))
    base = sys.modules.get("conversion.base")  # before 2026, the script defined the classes
    owner = getattr(base, "TextModel", None) or namespace.get("TextModel")
    owner = owner or namespace.get("Model")
    if owner is None or "main" not in namespace:
        raise ConfigError(
            f"{converter}: has no class TextModel, so it is not llama.cpp's "
            "convert_hf_to_gguf.py. Give that file."
        )
    owner.get_vocab_base_pre = lambda *_: name
    namespace["main"]()
