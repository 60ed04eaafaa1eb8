"""Trains a byte-level BPE tokenizer: split patterns, special tokens, and output files.

The same texts in the same order produce the same files. Independent of where the texts come from.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.common.files import write_atomically, write_json

EOS_TOKEN = "<|endoftext|>"
ANY_DIGITS = "any"

# The parts of each split pattern, in order: contractions and words, then symbols. `split_pattern`
# inserts the pattern for digits before the symbols, and appends the one for white space.
# Sources: gpt2: Radford et al. 2019, encoder.py. llama3: meta-llama/llama-models, tokenizer.py,
# which is tiktoken's cl100k_base. o200k: tiktoken_ext/openai_public.py.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PARTS = {
    "gpt2": ["'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?[^\s\p{L}\p{N}]+"],
    "llama3": [_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"],
    "o200k": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + _CONTRACTIONS + "?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + _CONTRACTIONS + "?",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    ],
}  # fmt: skip
_DIGITS = {"gpt2": ANY_DIGITS, "llama3": "3", "o200k": "3"}  # default digits for each split
_WHITESPACE_RUNS = r"\s+(?!\S)|\s+"
_WHITESPACE_RUNS_BY_LINE = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # line ends are separate pieces
WHITESPACE = ("runs", "single")
MAX_WORD_CHARACTERS = 1000  # maximum length of a piece passed to the trainer
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARACTERS}}}|\s{{{MAX_WORD_CHARACTERS}}}")


@dataclass(frozen=True)
class BpeOptions:
    """Options for training a byte-level BPE tokenizer.

    Attributes:
        vocab_size: number of ids, including special tokens and the 256 bytes.
        split: name of the pattern that splits a text into pieces; merges never cross pieces.
        digits: maximum number of digits per piece, "1", "3" or "any"; None for the split's default.
        whitespace: "runs", or "single" to put each white-space character into its own piece.
        special_tokens: special tokens in addition to the EOS token, which has id 0.
        min_frequency: number of times that a pair must occur to be merged.
    """

    vocab_size: int
    split: str = "gpt2"
    digits: str | None = None
    whitespace: str = "runs"
    special_tokens: tuple[str, ...] = ()
    min_frequency: int = 0

    def problems(self) -> list[str]:
        """Return a message for each invalid option."""
        lines = []
        for flag, value, allowed in (
            ("split", self.split, tuple(_PARTS)),
            ("digits", self.digits, (None, "1", "3", ANY_DIGITS)),
            ("whitespace", self.whitespace, WHITESPACE),
        ):
            if value not in allowed:
                choices = [choice for choice in allowed if choice]
                lines.append(
                    f"--{flag} {value}: is not one of {', '.join(choices)}."
                    f"{did_you_mean(str(value), choices)}"
                )
        names = [EOS_TOKEN, *self.special_tokens]
        duplicates = {name for name in names if names.count(name) > 1}
        lines += [
            f"--special_tokens {name!r}: is given twice, or is the EOS token. Remove it."
            for name in sorted(duplicates)
        ]
        lines += ["--special_tokens '': is empty. Remove it."] * ("" in names)
        if self.vocab_size < 256 + len(names):
            lines.append(
                f"--vocab_size {self.vocab_size}: is too small for 256 bytes and {len(names)} "
                f"special tokens. Give at least {256 + len(names)}."
            )
        return lines


def split_pattern(split: str, digits: str | None = None, whitespace: str = "runs") -> str:
    """Return the regular expression that splits a text into pieces; merges never cross pieces."""
    *words, symbols = _PARTS[split]
    digits = digits or _DIGITS[split]
    numbers = {"1": r"\p{N}", "3": r"\p{N}{1,3}", ANY_DIGITS: r"\p{N}+"}[digits]
    if split == "gpt2" and digits == ANY_DIGITS:
        numbers = r" ?\p{N}+"
    spaces = _WHITESPACE_RUNS if split == "gpt2" else _WHITESPACE_RUNS_BY_LINE
    if whitespace == "single":
        spaces = r"\s"
    return "|".join([*words, numbers, symbols, spaces])


def train_bpe(texts: Iterable[str], options: BpeOptions, output: Path, progress: bool) -> int:
    """Train a byte-level BPE tokenizer and write it for `AutoTokenizer.from_pretrained`.

    Returns:
        The vocabulary size, which is smaller than requested if the texts contain too few pairs.
    """
    if problems := options.problems():
        raise ConfigError(problems)
    import tokenizers
    from tokenizers import decoders, models, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = _pre_tokenizer(options)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        min_frequency=options.min_frequency,
        special_tokens=[EOS_TOKEN, *options.special_tokens],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    split = _pre_tokenizer(options)  # the backend's own pre-tokenizer is locked during training
    parts = chain.from_iterable(cut_long_words(text, split) for text in texts)
    backend.train_from_iterator(parts, trainer)
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "tokenizer.json", backend.to_str(pretty=True).encode())
    write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "add_bos_token": False,  # for some splits, llama.cpp adds a BOS token by default
            "clean_up_tokenization_spaces": False,
        },
    )
    return backend.get_vocab_size()


def cut_long_words(text: str, pre_tokenizer: Any) -> Iterator[str]:
    """Yield a text in parts, so that no piece is longer than MAX_WORD_CHARACTERS.

    The training time is quadratic in the length of a piece: 80,000 characters take seconds, and 2
    million do not finish.
    """
    done = 0
    if len(text) > MAX_WORD_CHARACTERS and _LONG_WORD.search(text):
        for _, (start, end) in pre_tokenizer.pre_tokenize_str(text):
            for place in range(start, end, MAX_WORD_CHARACTERS):
                if end - start > MAX_WORD_CHARACTERS and place > done:
                    yield text[done:place]
                    done = place
    yield text[done:]


def _pre_tokenizer(options: BpeOptions) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    if (options.split, options.digits, options.whitespace) == ("gpt2", None, "runs"):
        return ByteLevel(add_prefix_space=False)  # without a pattern, it splits like GPT-2
    pattern = split_pattern(options.split, options.digits, options.whitespace)
    bytes_of_pieces = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(pattern), "isolated"), bytes_of_pieces])
