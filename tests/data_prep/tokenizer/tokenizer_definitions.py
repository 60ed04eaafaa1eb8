"""Tokenizers of many kinds, trained on the generated manual, as `tokenizer.json` files."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.manual import topics

EOS = "<|endoftext|>"
VOCAB_SIZE = 1200

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def split(pattern: str, prefix: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )


@cache
def texts() -> list[str]:
    return [
        *list(topics.values())[:30],
        "čeština, ελληνικά, Привет мир, 你好世界, こんにちは, मस्ते, مرحبا " * 8,
    ]


def byte_level(pre_tokenizer=None, normalizer=None, added=()) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def digits_before_bytes() -> tokenizers.Tokenizer:
    return byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    )


def metaspace() -> tokenizers.Tokenizer:
    """Llama 2's kind: BPE of characters with bytes for those it does not know."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<s>", EOS, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([line for text in texts() for line in text.split(" ")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", EOS],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts()[:8], trainer)
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["[UNK]", EOS], show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


DEFINITIONS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": byte_level,
    "llama3": lambda: byte_level(split(LLAMA3)),
    "o200k": lambda: byte_level(split(O200K)),
    "own_split": lambda: byte_level(split(r"\s?\p{L}{1,12}|\p{N}|\s+|[^\s\p{L}\p{N}]")),
    "digits": digits_before_bytes,
    "nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "prefix_space": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "added": lambda: byte_level(
        added=["function", " return", tokenizers.AddedToken("<tool>", lstrip=True, rstrip=True)]
    ),
    "metaspace": metaspace,
    "unigram": unigram,
    "wordpiece": wordpiece,
}


def write_definition(name: str, directory: Path) -> Path:
    """Write a tokenizer's copy, and return where it is."""
    target = directory / name
    target.mkdir(parents=True)
    DEFINITIONS[name]().save(str(target / "tokenizer.json"))
    return target
