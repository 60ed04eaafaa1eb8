"""Tokenizers whose ids differ are told apart; a larger one that keeps all ids is not refused."""

import pytest
from tokenizers import Tokenizer, models

from zerolm.pretrained.vocabulary import difference, vocabulary

WORDS = {word: number for number, word in enumerate(["a", "b", "c", "d", "e", "f", "g", "h"])}


def test_a_saved_tokenizer_gives_its_ids_with_added_tokens(tmp_path) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert vocabulary(tmp_path) == {**WORDS, "<eos>": 8}
    assert vocabulary(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (WORDS, ""),
        ({**WORDS, "new": 8}, ""),
        ({**WORDS, "g": 7, "h": 6}, "2 of 8 common tokens have other ids: 'g' is 7, not 6"),
        ({f"▁{word}": number for word, number in WORDS.items()}, "only 0 of 8 ids stand for the"),
        ({("reserved" if n == 7 else w): n for w, n in WORDS.items()}, ""),
    ],
)
def test_only_ids_that_mean_other_tokens_are_a_difference(ours, expected) -> None:
    text = difference(ours, WORDS)
    assert text.startswith(expected) and bool(text) == bool(expected)
