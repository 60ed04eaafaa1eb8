"""`train_bpe`: training is deterministic, and merges never cross the pieces of the split."""

import random

import pytest
import regex
from transformers import AutoTokenizer

from data_prep.tokenizer.bpe import (
    BpeOptions,
    _pre_tokenizer,
    cut_long_words,
    split_pattern,
    train_bpe,
)
from tests.data_prep.small_corpus import TEXTS
from tests.data_prep.tokenizer.tokenizer_definitions import LLAMA3, O200K
from zerolm.common.errors import ConfigError

PROSE = [
    "In 1984 there were 12345 of them, 7 more; don't ask.\n\n    if x == 1000000:\n\treturn 99\n",
    *TEXTS,
] * 4  # fmt: skip


def test_training_is_deterministic_and_transformers_loads_the_result(tmp_path, tokenizer_directory):
    assert train_bpe(TEXTS * 2, BpeOptions(300), tmp_path / "again", progress=False) == 300
    for path in tokenizer_directory.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    assert len(tokenizer) == 300 and tokenizer.eos_token == "<|endoftext|>"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_training_returns_the_size_reached_if_the_text_has_too_few_pairs(tmp_path):
    assert train_bpe(["ab ab"], BpeOptions(5000), tmp_path / "small", progress=False) < 300


def test_split_patterns_are_the_published_ones():
    assert split_pattern("llama3") == LLAMA3
    assert split_pattern("o200k") == O200K
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    assert split_pattern("gpt2") == gpt2


@pytest.mark.parametrize("whitespace", ["runs", "single"])
@pytest.mark.parametrize("digits", ["1", "3", "any"])
@pytest.mark.parametrize("split", ["gpt2", "llama3", "o200k"])
def test_no_token_crosses_a_piece(tmp_path, split, digits, whitespace):
    """Pieces come from another library's regular expressions; digits and spaces are counted."""
    options = BpeOptions(420, split, digits, whitespace, ("<|user|>", "<|bot|>"))
    train_bpe(PROSE, options, tmp_path / "t", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|user|>", "<|bot|>"]
    pieces = regex.compile(split_pattern(split, digits, whitespace))
    for text in PROSE[: len(TEXTS) + 1]:
        found = pieces.findall(text)
        assert "".join(found) == text
        ids = [each for piece in found for each in _ids(tokenizer, piece)]
        assert _ids(tokenizer, text) == ids
    longest = {"1": 1, "3": 3, "any": 7}[digits]
    for token in tokenizer.get_vocab():
        text = tokenizer.convert_tokens_to_string([token])
        assert sum(map(str.isdigit, text)) <= longest, token
        if whitespace == "single" and text.isspace():
            assert len(text) == 1


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_pairs_that_are_rare_are_not_merged(tmp_path):
    texts = ["so common common common common rare"]
    options = BpeOptions(400, min_frequency=3)
    assert train_bpe(texts, options, tmp_path / "t", progress=False) < 400
    tokens = AutoTokenizer.from_pretrained(tmp_path / "t").tokenize(" common rare")
    assert tokens[0] == "Ġcommon" and tokens[1:] == ["Ġ", "r", "a", "r", "e"]


def test_all_invalid_options_are_reported_at_once(tmp_path):
    options = BpeOptions(200, "lama3", "2", "none", ("<|user|>", "<|user|>", ""))
    with pytest.raises(ConfigError) as refused:
        train_bpe(["text"], options, tmp_path / "t", progress=False)
    text = str(refused.value)
    for named in ("--split lama3", 'mean "llama3"', "--digits 2", "--whitespace none", "--special",
                  "is empty", "Give at least 260"):  # fmt: skip
        assert named in text
    assert not (tmp_path / "t").exists()


WORDS = ["a" * 60_000, "".join(random.Random(0).choices("ACGT", k=9_000)), "=" * 9_000,
         "\n" * 9_000, " " * 9_000, "字" * 9_000, "1" * 9_000]  # fmt: skip


@pytest.mark.parametrize("split", ["gpt2", "llama3", "o200k"])
def test_endless_words_are_cut_into_pieces_that_are_trained_on(tmp_path, split):
    """No text is lost, no piece is long, and other texts are unchanged."""
    options = BpeOptions(400, split)
    pre_tokenizer = _pre_tokenizer(options)
    texts = [*WORDS, "two words ".join(WORDS), "short", "many words " * 1000]
    for text in texts:
        parts = list(cut_long_words(text, pre_tokenizer))
        assert "".join(parts) == text
        pieces = [len(piece) for part in parts for piece in pieces_of(part, pre_tokenizer)]
        assert max(pieces) <= 1001  # a space may come with what follows it
        whole = [piece for piece in pieces_of(text, pre_tokenizer) if len(piece) <= 1000]
        assert set(whole) <= {piece for part in parts for piece in pieces_of(part, pre_tokenizer)}
    assert list(cut_long_words(texts[-1], pre_tokenizer)) == [texts[-1]]
    assert train_bpe(texts, options, tmp_path, False) == 400


def pieces_of(text, pre_tokenizer):
    return [text[slice(*place)] for _, place in pre_tokenizer.pre_tokenize_str(text)]
