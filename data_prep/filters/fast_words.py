"""`FastWords`: splits words like spaCy at a fraction of the cost, by splitting each distinct
segment only once.

datatrove's filters call `load_word_tokenizer(language).word_tokenize(text)`. A segment is the text
between two spaces. With spaCy's rules, the tokens of a segment do not depend on its neighbours,
with one exception: special cases (":)", "a.m.") are matched against the tokens of the whole text.
The longest of overlapping matches wins, and a match that spans a space changes nothing. Therefore,
adjacent segments that a special case may span are also split together. If the tokens then differ,
datatrove's own function splits the document. It is also used if the tokenizer is not spaCy's
rule-based one. Source: spacy/tokenizer.pyx, `_tokenize_affixes`, `_apply_special_cases`,
`_filter_special_spans`.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

# Maximum size of a cache, about 60 MB. A full cache is emptied; frequent segments are soon cached
# again.
MAX_SEGMENTS = 1 << 18

# spaCy's string number 1. At the end of a memory zone, `preshed` does not remove the key 1, so the
# next document with this word would read freed memory (datatrove: "breaks the tokenizer
# completely"). A word that is added to the vocabulary before the first zone is never freed.
# Source: preshed/maps.pyx, `map_clear`.
FIRST_WORD = "IS_ALPHA"

WordTokenizer = Callable[[str], list[str]]


def install(language: str) -> bool:
    """Make datatrove split words in a language with `FastWords`; return whether that is possible.

    Raises:
        ValueError: datatrove has no tokenizer for the language.
        ImportError: the tokenizer's package is not installed.
    """
    from datatrove.utils.word_tokenizers import SpaCyTokenizer, load_word_tokenizer

    with contextlib.suppress(ImportError):  # the language may use another package's tokenizer
        import_spacy()
    tokenizer = load_word_tokenizer(language)
    if not isinstance(tokenizer, SpaCyTokenizer) or tokenizer.config is not None:
        return False
    import spacy.tokenizer

    nlp = tokenizer.tokenizer
    if type(nlp.tokenizer) is not spacy.tokenizer.Tokenizer:
        return False
    if not isinstance(tokenizer.word_tokenize, FastWords):
        tokenizer.word_tokenize = FastWords(nlp, tokenizer.word_tokenize)
    return True


def import_spacy() -> None:
    """Import spaCy without torch; `thinc` would import torch, which takes seconds in each task.

    Raises:
        ImportError: spaCy is not installed.
    """
    hide_torch = "torch" not in sys.modules
    if hide_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import spacy  # noqa: F401
    finally:
        if hide_torch:
            del sys.modules["torch"]


class FastWords:
    """Replaces the `word_tokenize` method of a spaCy tokenizer; caches the words of each segment.

    Args:
        nlp: a spaCy language with its rule-based tokenizer.
        fallback: datatrove's `word_tokenize`, for documents that cannot be split by segment.
    """

    def __init__(self, nlp: Any, fallback: WordTokenizer):
        self.nlp, self.fallback = nlp, fallback
        nlp.vocab[FIRST_WORD]
        rules = nlp.tokenizer
        self.segments: dict[str, _Segment] = {}
        self.independent: dict[str, bool] = {}  # adjacent segments, joined by spaces
        tokenize = _without_special_cases(rules)
        specials = [[token.text for token in tokenize(special)] for special in rules.rules]
        pairs = sorted({pair for words in specials for pair in pairwise(words)})
        self.firsts, self.seconds = defaultdict(list), defaultdict(list)
        for number, (first, second) in enumerate(pairs):
            self.firsts[first[-1]].append((1 << number, first))
            self.seconds[second[0]].append((1 << number, second))

    def __call__(self, text: str) -> list[str]:
        """Split a text into the same words as datatrove."""
        parts = text.split()
        segments = self.segments
        if new := [part for part in dict.fromkeys(parts) if part not in segments]:
            if len(segments) + len(new) > MAX_SEGMENTS:
                segments.clear()
                new = list(dict.fromkeys(parts))
            self._split(new)
        words: list[str] = []
        before, before_part = NO_SEGMENT, ""
        chain: list[str] = []  # adjacent segments that a special case may span
        for part in parts:
            segment = segments[part]
            if before.ends_first & segment.begins_second:
                chain = chain or [before_part]
                chain.append(part)
            elif chain:
                if not self._is_independent(" ".join(chain)):
                    return self.fallback(text)
                chain = []
            before, before_part = segment, part
            words += segment.words
        if chain and not self._is_independent(" ".join(chain)):
            return self.fallback(text)
        return words

    def _split(self, new: list[str]) -> None:
        """Split new segments into words, and add them to the cache."""
        tokens = iter(self._tokens("\n".join(new)))  # newlines keep the segments' tokens separate
        for part in new:
            words = tuple(iter(tokens.__next__, "\n")) if part != new[-1] else tuple(tokens)
            begins_second = ends_first = 0
            for bit, second in self.seconds.get(part[0], ()):
                begins_second |= bit * part.startswith(second)
            for bit, first in self.firsts.get(part[-1], ()):
                ends_first |= bit * part.endswith(first)
            self.segments[part] = _Segment(words, begins_second, ends_first)

    def _is_independent(self, chain: str) -> bool:
        """Return whether adjacent segments yield the same tokens together as they do separately."""
        independent = self.independent.get(chain)
        if independent is None:
            alone = [word for part in chain.split() for word in self.segments[part].words]
            independent = self._tokens(chain) == alone
            if len(self.independent) >= MAX_SEGMENTS:
                self.independent.clear()
            self.independent[chain] = independent
        return independent

    def _tokens(self, text: str) -> list[str]:
        with self.nlp.memory_zone():  # without a zone, every new word would stay in the vocabulary
            return [token.text for token in self.nlp.tokenizer(text)]


class _Segment(NamedTuple):
    """The words of a segment, and the special cases that may extend across its boundaries.

    The special cases are stored as bit masks, in which bit n represents the nth pair of adjacent
    tokens that occurs in a special case.
    """

    words: tuple[str, ...]
    begins_second: int  # pairs whose second token the segment begins with
    ends_first: int  # pairs whose first token the segment ends with


NO_SEGMENT = _Segment((), 0, 0)


def _without_special_cases(rules: Any) -> Any:
    """Return a tokenizer without special cases, whose tokens spaCy matches against the special
    cases.
    """
    import spacy.tokenizer

    return spacy.tokenizer.Tokenizer(
        rules.vocab,
        rules={},
        prefix_search=rules.prefix_search,
        suffix_search=rules.suffix_search,
        infix_finditer=rules.infix_finditer,
        token_match=rules.token_match,
        url_match=rules.url_match,
    )
