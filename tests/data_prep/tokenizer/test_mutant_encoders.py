"""`check_equivalence` finds encoders that err on one kind of input: mutants of a real tokenizer.

All code points of the classes that the mutants confuse are tried, and every 50th of the others.
"""

import json
import re
import unicodedata

import numpy as np
import pytest
import tokenizers

from data_prep.tokenizer import equivalence, fuzz_texts
from data_prep.tokenizer.backends import open_backend
from data_prep.tokenizer.equivalence import check_equivalence
from data_prep.tokenizer.vocabulary import added_tokens, token_texts
from tests.data_prep.tokenizer.tokenizer_definitions import split, write_definition

CJK, TANGUT, PRIVATE = 0x4E2D, 0x17005, 0xE123
TRIED = {CJK, TANGUT, PRIVATE, *range(0x80, 0x600), 0xAC01, 0xE31, 0x3000, 0x1F600, 0x2F800, 0xFEFF}
REPLACED = {
    "a letter of a large block": ("\u4e2d", "", {CJK}),
    "a letter of a rare block": ("\U00017005", "", {TANGUT}),
    "a private code point": ("\ue123", "x", {PRIVATE}),
    "an emoji": ("\U0001f600", "", {0x1F600}),
    "a byte order mark": ("\ufeff", "", {0xFEFF}),
    "a syllable in its normal form": ("\uac01", "\u1100\u1161\u11a8", {0xAC01}),
    "an ideograph in its normal form": ("\U0002f800", "\u4e3d", {0x2F800}),
    "a letter in lower case": ("\u0130", "i", {0x130}),
    "a contraction with a long s": ("'\u017f", "'s", {0x17F}),
    "marks in another order": ("\u0345\u0334", "\u0334\u0345", {0x334, 0x345}),
    "a pair of categories": ("([\u0430-\u044f])\u0301", r"\1", {0x430}),
    "white space at the end": (r"\s+\Z", "", None),
    "line breaks": ("\r\n", "\n", None),
    "a long run of spaces": (" {25,}", " ", None),
    "a long run of signs": ("={255,}", "=", None),
    "a long word": ("[a-fXYZ0123]{300,}", "a", None),
    "a special token": (re.escape("<|endoftext|>"), "", None),
    "a letter before a digit": ("z(?=7)", "", None),
}
LETTER, NUMBER, SPACE = r"\p{L}", r"\p{N}", r"\s"
CONFUSED = {
    "a letter of a large block": {"letter": r"(?:(?!\x{4E2D})\p{L})"},
    "a letter of a rare block": {"letter": r"(?:(?!\x{17005})\p{L})"},
    "a private code point": {"letter": r"(?:\p{L}|\x{E123})"},
    "an emoji": {"letter": r"(?:\p{L}|\x{1F600})"},
    "a mark": {"letter": r"(?:\p{L}|\x{E31})"},
    "the ideographic space": {"space": r"(?:(?!\x{3000})\s)"},
    "the control of a next line": {"space": r"(?:(?!\x{85})\s)"},
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A tokenizer with an id for 's, as those of real text have."""
    directory = write_definition("gpt2", tmp_path_factory.mktemp("copy"))
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    model = content["model"]
    assert "'s" not in model["vocab"]
    model["vocab"]["'s"] = len(model["vocab"])
    model["merges"].append(["'", "s"])
    path.write_text(json.dumps(content))
    return directory


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    likely = fuzz_texts.likely_code_points()
    tried = sorted(TRIED.intersection(likely) | set(likely[::50]))
    monkeypatch.setattr(fuzz_texts, "likely_code_points", lambda: tried)
    monkeypatch.setattr(equivalence, "RANDOM_TEXTS", 1000)


def check(copy, candidate):
    """Return why the candidate is refused, and the code points that are excluded."""
    vocabulary = [*added_tokens(copy), *filter(None, token_texts(copy).values())]
    result = check_equivalence(open_backend("tokenizers", copy), candidate, vocabulary)
    proven = {number for start, stop in result.proven for number in range(start, stop)}
    return result.refused, set(fuzz_texts.likely_code_points()) - proven


@pytest.mark.parametrize("name", REPLACED)
def test_a_text_that_is_read_as_another_is_found(copy, name):
    pattern, other, numbers = REPLACED[name]
    encode = open_backend("tokenizers", copy)
    refused, excluded = check(
        copy, lambda texts: encode([re.sub(pattern, other, text) for text in texts])
    )
    if numbers is None:
        assert refused is not None
    else:
        assert refused is None and numbers & excluded


def test_an_entry_of_the_vocabulary_that_is_not_used_is_found(copy):
    encode = open_backend("tokenizers", copy)
    entry = max(token_texts(copy).values(), key=len)
    parts = entry[:-1], entry[-1]

    def without_it(texts):
        cut = [text.partition(entry) for text in texts]
        return [
            np.concatenate(encode([before + parts[0], parts[1] + after])) if found else one
            for one, (before, found, after) in zip(encode(texts), cut, strict=True)
        ]

    assert check(copy, without_it)[0] is not None


def test_normal_forms_are_found(copy):
    encode = open_backend("tokenizers", copy)
    for form in ("NFC", "NFD", "NFKC"):
        refused, excluded = check(
            copy, lambda texts, form=form: encode([unicodedata.normalize(form, t) for t in texts])
        )
        assert refused or len(excluded) > 10


@pytest.mark.parametrize("name", ["nothing", *CONFUSED])
def test_a_code_point_of_another_class_is_found(copy, name):
    classes = {"letter": LETTER, "space": SPACE, **CONFUSED.get(name, {})}
    letter, space = classes["letter"], classes["space"]
    other = f"(?:(?!{space}|{letter}|{NUMBER})[\\s\\S])"
    words = f" ?{letter}+| ?{NUMBER}+| ?{other}+|{space}+(?!(?!{space})[\\s\\S])|{space}+"
    mutant = tokenizers.Tokenizer.from_str((copy / "tokenizer.json").read_text())
    mutant.pre_tokenizer, mutant.encode_special_tokens = (
        split(f"'s|'t|'re|'ve|'m|'ll|'d|{words}"),
        True,
    )

    def encode(texts):
        encodings = mutant.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in encodings]

    refused, excluded = check(copy, encode)
    assert refused is None
    assert bool(excluded) == (name != "nothing")
