"""Words as spaCy splits them, at a fraction of its cost: each run of characters is split once.

datatrove's filters ask `load_word_tokenizer(language).word_tokenize(text)`. With spaCy's rules the
tokens of a run between spaces do not depend on its neighbours, but in one case: special cases
(":)", "a.m.") are found in the tokens of the whole text, the longest of those that overlap wins,
and one that lies over a space changes nothing. So runs that a special case may lie over are split
together too, and where that differs, the document is left to datatrove's own function. So is
everything that is not spaCy's rule-based tokenizer. Source: spacy/tokenizer.pyx,
`_tokenize_affixes`, `_apply_special_cases` and `_filter_special_spans`.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

# Remembered; some 60 MB. Then it begins anew, which keeps the frequent ones cheap.
MAX_RUNS = 1 << 18

# spaCy's word number 1. At the end of a memory zone `preshed` does not forget the key 1, so that
# the next document with this word would read freed memory (datatrove: "breaks the tokenizer
# completely"). Known before the first zone, it is never freed. Source: preshed/maps.pyx,
# `map_clear`.
FIRST_WORD = "IS_ALPHA"

Words = Callable[[str], list[str]]


def install(language: str) -> bool:
    """Make datatrove split words of a language by this; say whether it can be done.

    Raises:
        ValueError: datatrove has no tokenizer for the language.
        ImportError: the tokenizer's package is not installed.
    """
    from datatrove.utils.word_tokenizers import SpaCyTokenizer, load_word_tokenizer

    with contextlib.suppress(ImportError):  # the tokenizer of the language may be another's
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
    """Import spaCy without torch, which its `thinc` imports where it can, for seconds in each task.

    Raises:
        ImportError: spaCy is not installed.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import spacy  # noqa: F401
    finally:
        if hidden:
            del sys.modules["torch"]


class FastWords:
    """`word_tokenize` of a spaCy tokenizer, remembering the words of each run of characters.

    Args:
        nlp: a spaCy language with its rule-based tokenizer.
        slow: `word_tokenize` of datatrove, for documents that are not split run by run.
    """

    def __init__(self, nlp: Any, slow: Words):
        self.nlp, self.slow = nlp, slow
        nlp.vocab[FIRST_WORD]
        rules = nlp.tokenizer
        self.runs: dict[str, _Run] = {}
        self.simple: dict[str, bool] = {}  # of runs that follow each other
        plain = _without_special_cases(rules)
        specials = [[token.text for token in plain(special)] for special in rules.rules]
        pairs = sorted({pair for words in specials for pair in pairwise(words)})
        self.firsts, self.seconds = defaultdict(list), defaultdict(list)
        for number, (first, second) in enumerate(pairs):
            self.firsts[first[-1]].append((1 << number, first))
            self.seconds[second[0]].append((1 << number, second))

    def __call__(self, text: str) -> list[str]:
        """Return the words of a text, as datatrove does."""
        found = text.split()
        runs = self.runs
        if new := [each for each in dict.fromkeys(found) if each not in runs]:
            if len(runs) + len(new) > MAX_RUNS:
                runs.clear()
                new = list(dict.fromkeys(found))
            self._split(new)
        words: list[str] = []
        before = NO_RUN
        chain: list[str] = []  # runs between which special cases may lie
        last = ""
        for characters in found:
            run = runs[characters]
            if before.ends & run.begins:
                chain = chain or [last]
                chain.append(characters)
            elif chain:
                if not self._is_simple(" ".join(chain)):
                    return self.slow(text)
                chain = []
            before, last = run, characters
            words += run.words
        return words if not chain or self._is_simple(" ".join(chain)) else self.slow(text)

    def _split(self, new: list[str]) -> None:
        """Split runs that are not remembered; a newline between them keeps them apart."""
        tokens = iter(self._tokens("\n".join(new)))
        for characters in new:
            words = tuple(iter(tokens.__next__, "\n")) if characters != new[-1] else tuple(tokens)
            begins = ends = 0
            for bit, second in self.seconds.get(characters[0], ()):
                begins |= bit * characters.startswith(second)
            for bit, first in self.firsts.get(characters[-1], ()):
                ends |= bit * characters.endswith(first)
            self.runs[characters] = _Run(words, begins, ends)

    def _is_simple(self, chain: str) -> bool:
        """Say whether runs are split alone as they are together."""
        simple = self.simple.get(chain)
        if simple is None:
            alone = [word for each in chain.split() for word in self.runs[each].words]
            simple = self._tokens(chain) == alone
            if len(self.simple) >= MAX_RUNS:
                self.simple.clear()
            self.simple[chain] = simple
        return simple

    def _tokens(self, text: str) -> list[str]:
        with self.nlp.memory_zone():  # without it, every new word would stay in the vocabulary
            return [token.text for token in self.nlp.tokenizer(text)]


class _Run(NamedTuple):
    """What is remembered of a run; bit n of `begins` and `ends` is for pair n of tokens."""

    words: tuple[str, ...]
    begins: int  # it may begin with the second token of the pair
    ends: int  # it may end with the first


NO_RUN = _Run((), 0, 0)


def _without_special_cases(rules: Any) -> Any:
    """Return the tokenizer whose tokens special cases are matched against."""
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
