"""Words and their hashes, compared with a loop over characters."""

import random

import numpy as np
import pytest

from data_prep.dedup import word_hashes
from data_prep.dedup.word_hashes import hash_ngrams, hash_words, split_words
from tests.data_prep.dedup.near_copies import words_of
from tests.manual import topics

TEXTS = [
    "",
    " \n\t",
    "Don't re-use: the quick, BROWN fox.",
    "don’t RE–USE (the) quick brown\u2028fox",
    "Straße STRASSE strasse",
    "ﬁne caf\u00e9 cafe\u0301 Ｆｕｌｌ",
    "soft\u00adhyphen zero\u200bwidth \u200djoined \ufeffmark",
    "日本語のテキスト、中文也是。 ไทย mixed日本words",
    "3.14 x_y snake_case a+b \U0001f600\ufe0f न्यायालय 한국어 문장",
    "nul\x00byte e\u0301\u0301 \u0301alone",
    "one",
    *list(topics.values())[:24],
]


def test_words_equal_those_of_a_loop_over_characters():
    for text in TEXTS:
        assert split_words(text) == words_of(text), text


def test_case_punctuation_spacing_and_form_make_no_difference():
    same = ["The café, at 9 o’clock:\nre-opened!", "THE CAFE\u0301 at\u00a09 o'clock -- re opened"]
    one, two = (hash_words([text])[0] for text in same)
    assert np.array_equal(one, two) and len(one) == 8


def test_hashes_are_equal_if_and_only_if_words_are():
    hashes, ends = hash_words(TEXTS)
    expected = [words_of(text) for text in TEXTS]
    assert ends.tolist() == np.cumsum([len(each) for each in expected]).tolist()
    hash_of: dict[str, int] = {}
    for word, value in zip([w for each in expected for w in each], hashes.tolist(), strict=True):
        assert hash_of.setdefault(word, value) == value
    assert len(set(hash_of.values())) == len(hash_of) > 1000


@pytest.mark.parametrize("length", [1, 2, 13])
def test_ngrams_are_equal_if_their_words_are_and_stay_inside_a_text(length):
    hashes, ends = hash_ngrams(*hash_words(TEXTS), length)
    runs = []
    for text in TEXTS:
        each = words_of(text)
        runs.append([tuple(each[at : at + length]) for at in range(len(each) - length + 1)])
    assert ends.tolist() == np.cumsum([len(each) for each in runs]).tolist()
    hash_of: dict[tuple, int] = {}
    for run, value in zip([r for each in runs for r in each], hashes.tolist(), strict=True):
        assert hash_of.setdefault(run, value) == value
    assert len(set(hash_of.values())) == len(hash_of)


def test_the_order_of_words_and_characters_counts():
    hashes, _ = hash_words(["ab", "ba", "aab", "aba", "a b"])
    assert len(set(hashes.tolist())) == 6
    runs, _ = hash_ngrams(*hash_words(["a b", "b a"]), 2)
    assert runs[0] != runs[1]


def test_batches_and_pieces_of_long_texts_make_no_difference(monkeypatch):
    generator = random.Random(1)
    texts = [generator.choice(TEXTS) + " " + generator.choice(TEXTS) for _ in range(50)]
    long = " ".join(texts)
    alone = np.concatenate([hash_words([text])[0] for text in texts])
    assert np.array_equal(hash_words(texts)[0], alone)
    assert np.array_equal(hash_words([long])[0], alone)
    monkeypatch.setattr(word_hashes, "BATCH_CHARACTERS", 100)
    assert np.array_equal(hash_words([long])[0], alone)
    assert np.array_equal(hash_words(texts)[0], alone)


def test_hashes_never_change():
    """Files that one release wrote are compared with those of the next."""
    hashes, ends = hash_words(["The quick, brown fox; naïve 日本"])
    assert ends.tolist() == [7]
    runs, _ = hash_ngrams(hashes, ends, 3)
    assert [f"{value:016x}" for value in (hashes[0], hashes[6], runs[0])] == GOLDEN


GOLDEN = ["511ec4f9f4af60c0", "c88476539a620230", "41df74f0257c15b2"]
