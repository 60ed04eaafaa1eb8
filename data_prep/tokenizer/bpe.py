"""Train a byte-level BPE tokenizer: how words are split, special tokens, and the files.

Knows nothing of where the texts come from; the same texts in the same order give the same files.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolm.errors import ConfigError, did_you_mean
from zerolm.files import write_json

EOS_TOKEN = "<|endoftext|>"
ANY_DIGITS = "any"

# {name: (contractions, words, symbols, white space)}; digits stand between words and symbols.
# gpt2: Radford et al. 2019, encoder.py. llama3: meta-llama/llama-models, tokenizer.py, that is
# cl100k_base of tiktoken. o200k: tiktoken_ext/openai_public.py.
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PARTS = {
    "gpt2": ["'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?[^\s\p{L}\p{N}]+"],
    "llama3": [_CASES, r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"],
    "o200k": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + _CASES + "?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + _CASES + "?",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    ],
}  # fmt: skip
_DIGITS = {"gpt2": ANY_DIGITS, "llama3": "3", "o200k": "3"}  # of each split, unless said otherwise
_RUNS = {"gpt2": r"\s+(?!\S)|\s+"}  # of white space; elsewhere line ends are apart
_RUNS_BY_LINE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WHITESPACE = ("runs", "single")


@dataclass(frozen=True)
class Recipe:
    """What a tokenizer is trained to be."""

    vocab_size: int  # ids in all: special tokens, 256 bytes, merges
    split: str = "gpt2"
    digits: str | None = None  # "1", "3" or "any" in one piece; None: as the split has it
    whitespace: str = "runs"  # or "single": each white-space character is a piece
    special_tokens: tuple[str, ...] = ()  # beside the EOS token, which has id 0
    min_frequency: int = 0  # of a pair, to be merged

    def problems(self) -> list[str]:
        """Return what is wrong with it, a line each."""
        lines = []
        for flag, value, allowed in (
            ("split", self.split, tuple(_PARTS)),
            ("digits", self.digits, (None, "1", "3", ANY_DIGITS)),
            ("whitespace", self.whitespace, WHITESPACE),
        ):
            if value not in allowed:
                words = [word for word in allowed if word]
                lines.append(
                    f"--{flag} {value}: is not one of {', '.join(words)}."
                    f"{did_you_mean(str(value), words)}"
                )
        names = [EOS_TOKEN, *self.special_tokens]
        doubled = {name for name in names if names.count(name) > 1}
        lines += [f"--special_tokens {name!r}: is there already." for name in sorted(doubled)]
        lines += ["--special_tokens '': is empty."] * ("" in names)
        if self.vocab_size < 256 + len(names):
            lines.append(
                f"--vocab_size {self.vocab_size}: has no room for 256 bytes and {len(names)} "
                f"special tokens. Give at least {256 + len(names)}."
            )
        return lines


def split_pattern(split: str, digits: str | None = None, whitespace: str = "runs") -> str:
    """Return the regular expression whose matches are the pieces that are never merged."""
    *words, symbols = _PARTS[split]
    digits = digits or _DIGITS[split]
    numbers = {"1": r"\p{N}", "3": r"\p{N}{1,3}", ANY_DIGITS: r"\p{N}+"}[digits]
    if split == "gpt2" and digits == ANY_DIGITS:
        numbers = r" ?\p{N}+"
    spaces = r"\s" if whitespace == "single" else _RUNS.get(split, _RUNS_BY_LINE)
    return "|".join([*words, numbers, symbols, spaces])


def train_tokenizer(texts: Iterable[str], recipe: Recipe, output: Path, progress: bool) -> int:
    """Train a byte-level BPE and write it for `AutoTokenizer.from_pretrained`.

    Returns:
        The vocabulary size reached, which is less when the texts have too few different words.

    Raises:
        ConfigError: a recipe that cannot be.
    """
    if problems := recipe.problems():
        raise ConfigError(problems)
    import tokenizers
    from tokenizers import decoders, models, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = _pre_tokenizer(recipe)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        min_frequency=recipe.min_frequency,
        special_tokens=[EOS_TOKEN, *recipe.special_tokens],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    backend.train_from_iterator(iter(texts), trainer)
    output.mkdir(parents=True, exist_ok=True)
    temporary = output / "tokenizer.json.tmp"
    backend.save(str(temporary))
    os.replace(temporary, output / "tokenizer.json")
    write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "clean_up_tokenization_spaces": False,
        },
    )
    return backend.get_vocab_size()


def _pre_tokenizer(recipe: Recipe) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    if recipe == Recipe(
        recipe.vocab_size,
        special_tokens=recipe.special_tokens,
        min_frequency=recipe.min_frequency,
    ):
        return ByteLevel(add_prefix_space=False)  # which splits as GPT-2 does by itself
    pattern = split_pattern(recipe.split, recipe.digits, recipe.whitespace)
    bytes_of_pieces = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(pattern), "isolated"), bytes_of_pieces])
