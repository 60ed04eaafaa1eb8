"""`check_equivalence`: differences are found, and excluded or refused; the proven code points are
exact."""

import re
import threading
import time
import unicodedata

import numpy as np
import pytest

from data_prep.tokenizer import equivalence, fuzz_texts
from data_prep.tokenizer.equivalence import check_equivalence

LETTERS = [*range(0xA0, 0x180), 0x301, 0x3C9, 0x4E2D, 0xAC00, 0x1F600]


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    monkeypatch.setattr(fuzz_texts, "likely_code_points", lambda: LETTERS)
    monkeypatch.setattr(equivalence, "RANDOM_TEXTS", 600)


def encode(texts, change=lambda text: text):
    """Give each text its code points as ids."""
    return [np.array([*map(ord, change(text))], np.uint32) for text in texts]


def changed_by(change):
    return lambda texts: encode(texts, change)


def test_equal_encoders_are_proven_for_every_code_point_tried():
    result = check_equivalence(encode, encode, ["the", "<|endoftext|>"])
    assert result.refused is None and result.num_excluded == 0
    proven = {number for start, stop in result.proven for number in range(start, stop)}
    assert proven == {*range(128), *LETTERS}
    assert result.num_texts > 600 and result.num_bytes > 100_000


def test_a_code_point_that_causes_a_difference_is_not_proven():
    result = check_equivalence(encode, changed_by(lambda text: text.replace("ē", "x")), [])
    proven = {number for start, stop in result.proven for number in range(start, stop)}
    assert result.refused is None
    assert proven == {*range(128), *LETTERS} - {ord("ē")}


def test_a_difference_of_two_code_points_together_excludes_them():
    """No single code point shows the difference; random texts find it."""
    pair = "\u0301\u03c9"
    result = check_equivalence(
        encode, changed_by(lambda text: text.replace(pair, "x")), [pair + "token"]
    )
    proven = {number for start, stop in result.proven for number in range(start, stop)}
    assert result.refused is None and result.num_excluded > 0
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
    result = check_equivalence(encode, changed_by(change), ["<|end|>"])
    assert result.refused is not None and not result.proven
    assert re.search(shown, result.refused), result.refused


def test_an_encoder_that_fails_on_a_text_is_refused():
    def fails(texts):
        if any("{" in text for text in texts):
            raise RuntimeError("panicked")
        return encode(texts)

    result = check_equivalence(encode, fails, [])
    assert "RuntimeError for '{'" in result.refused


def test_an_encoder_that_failed_once_is_not_refused():
    failures = iter([True, True])

    def fails_at_first(texts):
        if next(failures, False):
            raise RuntimeError("Already borrowed")
        return encode(texts)

    assert check_equivalence(encode, fails_at_first, []).refused is None


def test_the_candidate_is_called_by_one_thread_at_a_time():
    lock = threading.Lock()

    def exclusive(texts):
        if not lock.acquire(blocking=False):
            raise RuntimeError("Already borrowed")
        try:
            time.sleep(0.001)  # lets other threads run
            return encode(texts)
        finally:
            lock.release()

    assert check_equivalence(encode, exclusive, []).refused is None


def test_an_encoder_with_too_few_proven_code_points_is_refused():
    result = check_equivalence(
        encode, changed_by(lambda text: text.encode("ascii", "replace").decode()), []
    )
    assert result.refused is not None


def test_the_texts_try_every_likely_code_point(monkeypatch):
    monkeypatch.undo()
    numbers = set(fuzz_texts.likely_code_points())
    known = {
        number
        for number in range(128, 0x110000)
        if unicodedata.category(chr(number)) not in ("Cn", "Co", "Cs")
    }
    assert known <= numbers and len(numbers) - len(known) < 8000
    for number in (0xE9, 0x4E2D, 0x1F600):
        assert fuzz_texts.code_point_text(number).count(chr(number)) >= 2
    allowed = [0xE9, 0x4E2D]
    texts = list(fuzz_texts.random_texts(7, allowed, 200))
    assert texts == list(fuzz_texts.random_texts(7, allowed, 200))
    assert {number for text in texts for number in map(ord, text)} <= {*range(128), *allowed}
