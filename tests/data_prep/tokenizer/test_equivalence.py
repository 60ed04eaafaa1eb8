"""data_prep/equality.py: differences are found, explained or refused; the proven set is exact."""

import re
import unicodedata

import numpy as np
import pytest

from data_prep import equality, fuzz_texts
from data_prep.equality import prove

LETTERS = [*range(0xA0, 0x180), 0x301, 0x3C9, 0x4E2D, 0xAC00, 0x1F600]


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    monkeypatch.setattr(fuzz_texts, "code_points", lambda: LETTERS)
    monkeypatch.setattr(equality, "RANDOM_TEXTS", 600)


def encode(texts, change=lambda text: text):
    """Give each text its code points as ids."""
    ids = [np.array([*map(ord, change(text))], np.uint32) for text in texts]
    return np.concatenate([np.empty(0, np.uint32), *ids]), np.cumsum([len(each) for each in ids])


def changed_by(change):
    return lambda texts: encode(texts, change)


def test_equal_encoders_are_proven_for_every_code_point_tried():
    proof = prove(encode, encode, ["the", "<|endoftext|>"])
    assert proof.refused is None and proof.num_excluded == 0
    proven = {number for start, stop in proof.proven for number in range(start, stop)}
    assert proven == {*range(128), *LETTERS}
    assert proof.num_texts > 600 and proof.num_bytes > 100_000


def test_a_code_point_that_makes_a_difference_is_not_proven():
    proof = prove(encode, changed_by(lambda text: text.replace("ē", "x")), [])
    proven = {number for start, stop in proof.proven for number in range(start, stop)}
    assert proof.refused is None
    assert proven == {*range(128), *LETTERS} - {ord("ē")}


def test_a_difference_of_two_code_points_together_excludes_them():
    """In no text of the sweep; random texts find it."""
    pair = "\u0301\u03c9"
    proof = prove(encode, changed_by(lambda text: text.replace(pair, "x")), [pair + "token"])
    proven = {number for start, stop in proof.proven for number in range(start, stop)}
    assert proof.refused is None and proof.num_excluded > 0
    assert not set(map(ord, pair)) <= proven


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda text: text.replace("'LL", "x"), '"\'LL"'),
        (lambda text: text.replace("\r\n", "\n"), r"'\\r\\n'"),
        (lambda text: text.replace("    ", "\t"), "'    '"),
        (lambda text: text.replace("<|end|>", ""), r"'<\|end\|>'"),
        (lambda text: text[:200], "'"),
        (lambda text: text + "\0", r"for '\\x00'"),
    ],
    ids=["contraction", "newline", "spaces", "special token", "cut", "more"],
)
def test_a_difference_within_ascii_refuses_the_encoder(change, shown):
    proof = prove(encode, changed_by(change), ["<|end|>"])
    assert proof.refused is not None and not proof.proven
    assert re.search(shown, proof.refused), proof.refused


def test_an_encoder_that_fails_on_a_text_is_refused():
    def fails(texts):
        if any("{" in text for text in texts):
            raise RuntimeError("panicked")
        return encode(texts)

    proof = prove(encode, fails, [])
    assert "RuntimeError for '{'" in proof.refused


def test_an_encoder_with_hardly_anything_proven_is_refused():
    proof = prove(encode, changed_by(lambda text: text.encode("ascii", "replace").decode()), [])
    assert proof.refused is not None


def test_the_texts_try_every_likely_code_point(monkeypatch):
    monkeypatch.undo()
    numbers = set(fuzz_texts.code_points())
    known = {
        number
        for number in range(128, 0x110000)
        if unicodedata.category(chr(number)) not in ("Cn", "Co", "Cs")
    }
    assert known <= numbers and len(numbers) - len(known) < 8000
    for number in (0xE9, 0x4E2D, 0x1F600):
        assert fuzz_texts.in_contexts(number).count(chr(number)) >= 2
    allowed = [0xE9, 0x4E2D]
    texts = list(fuzz_texts.at_random(7, allowed, 200))
    assert texts == list(fuzz_texts.at_random(7, allowed, 200))
    assert {number for text in texts for number in map(ord, text)} <= {*range(128), *allowed}
