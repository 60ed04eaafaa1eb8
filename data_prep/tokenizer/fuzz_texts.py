"""Test texts on which two encoders must agree before one may replace the other.

The texts cover all cases in which encoders have been found to differ: rare and unassigned code
points, case folding after apostrophes, runs of white space, digits, normalization, and special
tokens that are spelled out. The same seed and code points produce the same texts. Independent of
encoders.
"""

import functools
import itertools
import random
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

# Code points that are used but not assigned in this Python's Unicode tables: private use, new
# emoji.
EXTRA_CODE_POINTS = (range(0xE000, 0xF900), range(0x1F000, 0x1FB00))
PLANES = (range(0x80, 0x40000), range(0xE0000, 0xE1000))  # the others have no assigned code points
# Blocks of letters, syllables and private use whose code points have the same properties: no case,
# no combining class, and no normal forms but those of Hangul and of compatibility ideographs.
PLAIN_LETTERS = (
    range(0x3400, 0xA48D), range(0xA500, 0xA60C), range(0xAC00, 0xD7A4), range(0xE000, 0xF900),
    range(0x10600, 0x10768), range(0x12000, 0x1239A), range(0x12480, 0x12544),
    range(0x13000, 0x13430), range(0x14400, 0x14647), range(0x16800, 0x16A39),
    range(0x17000, 0x187F8), range(0x18800, 0x18CD6), range(0x18D00, 0x18D09),
    range(0x1B000, 0x1B2FC), range(0x1E800, 0x1E8C5), range(0x20000, 0x323B0),
)  # fmt: skip
BEFORE_PLAIN = ("a", " ", "A")
ALL_CONTEXTS_ONE_IN = 32  # of the plain letters
SPACES = (
    " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f"
    "\u205f\u2060\u3000\ufeff"
)
DIGITS = "0123456789٠١٢٣४५६๑๒３４５²³¹½¾Ⅷ①𝟘𝟙"
MARKS = "\u0300\u0301\u0308\u0327\u0338\u0345\u05b4\u0651\u093f\u094d\u0e31\u200c\u200d\ufe0f\u20e3"
CONTRACTIONS = (
    "s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "Ve", "M", "lL", "D", "ſ", "K",
)  # fmt: skip
CHANGES: tuple[Callable[[str], str], ...] = (
    str, str.upper,
    *(partial(unicodedata.normalize, form) for form in ("NFC", "NFD", "NFKC", "NFKD")),
)  # fmt: skip
JAMO = "\u1161\u11a8"
BASES = ("e", "A", "o", " ", "1", "ᄀ", "가")
LONG = ("a", "ab", "=", "-", " ", "\n", "0", "é", "ha")
AROUND_SPACES = ("a", "x1", "", "é", ".", "{", "中")
BEFORE_APOSTROPHES = ("I", "we", "o", "", " ", "ſ", "é", "1", "(")
AFTER_CONTRACTIONS = ("", " ", "x", "'", "1", "é", "\u0301")
ASCII = "".join(map(chr, range(128)))
CONTROLS = [*map(chr, range(32)), *("\x7f" for _ in range(32)), *map(chr, range(128, 160))]
SIX_OF_TEN = (True, True, True, False, False)
APOSTROPHES = "''''’ʼ`´"
SYMBOLS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~…—–«»“”€£∑√≠©®™°§¶†•→☃♥'
CODE = (
    "def f(x, *args):\n    return x[1:-1] != {'a': 0x1F, \"b\": 1e-9}\n\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i]*b[i];\t// §\n\t}\r\n",
    '<a href="https://example.org/?q=1&amp;r=%20#top">x</a>\n\n\n<br/>',
    "SELECT * FROM t WHERE id=42 AND name LIKE '%o''k%';--\n",
    "$ grep -rn 'TODO' ./src | awk '{print $1}' >> out.txt 2>&1\n",
    '{"key": [1, 2.50, null, true], "u": "\\u00e9\\n"}\n',
    "\\begin{equation} E = mc^2 \\end{equation} % $x_{i+1}$\n",
)
SENTENCES = (
    "It's what they'd've said: \"We're 3rd of 1,024 (99.5%)!\" -- and I'll say so.",
    "Žluťoučký kůň úpěl ďábelské ódy; 12. května 2024 v 8:30 hod.",
    "Les élèves n'ont qu'à l'apprendre ; c'est ça, « naïveté » et cœur.",
    "Größe, Straße, ÄÖÜ: „Übung macht den Meister“, sagte er.",
    "El pingüino Wenceslao hizo kilómetros; ¿cuántos? ¡Muchísimos!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю № 5.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, ΌΧΙ σήμερα.",
    "İstanbul'da ılık bir şubat günüydü, DEĞİL Mİ?",
    "Đây là một câu tiếng Việt có rất nhiều dấu thanh.",
    "我能吞下玻璃而不伤身体。第１２章：「你好」，他说……",
    "いろはにほへと ちりぬるを、カタカナもあります。ﾊﾝｶｸ１２３",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني ١٢٣٤.",
    "אני יכול לאכול זכוכית וזה לא מזיק לי; שָׁלוֹם.",
    "मैं काँच खा सकता हूँ, मुझे उस से कोई पीडा नहीं होती १२३।",
    "ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ ๑๒๓",
    "আমি কাঁচ খেতে পারি। நான் கண்ணாடி சாப்பிடுவேன். మీరు ఎలా ఉన్నారు?",
    "მინას ვჭამ და არა მტკივა. Կրնամ ապակի ուտել։ እኔ ብርጭቆ መብላት እችላለሁ።",
    "👩‍👩‍👧‍👦 family, 👍🏽 thumbs, 🇨🇿🇺🇸 flags, 1️⃣ keycap, ❤️‍🔥 and 𝓯𝓪𝓷𝓬𝔂 𝟙𝟚𝟛",
)

Make = Callable[[random.Random, Sequence[int]], str]


def likely_code_points() -> list[int]:
    """Return all assigned non-ASCII code points: those that texts are likely to contain."""
    likely = {number for numbers in EXTRA_CODE_POINTS for number in numbers}
    category = unicodedata.category
    for plane in PLANES:
        likely.update(number for number in plane if category(chr(number)) not in ("Cn", "Co", "Cs"))
    return sorted(likely)


@functools.cache
def plain_letters() -> frozenset[int]:
    return frozenset(itertools.chain(*PLAIN_LETTERS))


def code_point_text(number: int) -> str:
    """Return a text in which a code point occurs next to letters, digits, spaces, apostrophes and
    marks.

    Plain letters take turns with what stands before them, and one in 32 is tried in all contexts:
    there are 130,000, and the reference's time depends on the number of words. After them is a
    contraction, which ends in another token if a letter is taken for anything else.
    """
    one = chr(number)
    if number in plain_letters() and number % ALL_CONTEXTS_ONE_IN:
        return f"{BEFORE_PLAIN[number % len(BEFORE_PLAIN)]}{one}'s"
    # The marks have combining classes 230, 240 and 1, so normalization reorders them.
    return f"a{one}b {one} '{one}'s{one} 1{one}2{one}{one}\n{one}A.{one}\u0301\u0345{one}\u0334"


def ascii_texts() -> Iterator[str]:
    """Yield pairs of ASCII characters, contractions, runs of white space, digits, and code."""
    for first in map(chr, range(128)):
        yield "".join(
            f"a{first}{second}b {first}{second} 1{second}{first}" for second in map(chr, range(128))
        )
    for ending in ("s", "t", "re", "ve", "m", "ll", "d", "x"):
        for cased in {ending, ending.upper(), ending.title(), ending.title().swapcase()}:
            yield f"'{cased}"
            yield f"a'{cased} a'{cased}b I'{cased}1 '{cased}A 1'{cased}' \n'{cased}\n''{cased}"
    for length in range(1, 5):
        for run in map("".join, itertools.product(" \n\r\t", repeat=length)):
            yield run
            yield f"a{run}b{run}1{run}.{run}"
    for length in range(1, 14):
        yield f"{'1234567890123'[:length]} a{'9' * length}b {'0' * length}.{'5' * length}"
    for one in "a0 =-\n\t":
        yield from (one * length for length in (7, 31, 64, 255, 4096))
    yield from ("", "don't", "DON'T", *CODE)


def vocabulary_texts(tokens: Collection[str]) -> Iterator[str]:
    """Yield a text for each token: the token as a word, repeated, and inside words.

    Adds the token in capitals, and without its last character, unless another text has them.
    """
    seen = set(tokens)
    for token in tokens:
        others = [each for each in (token.upper(), token[:-1]) if each not in seen]
        seen.update(others)
        yield f"{token} {token}{token}x{token}\n" + "".join(f"{each} " for each in others)


def random_texts(seed: int, allowed: Sequence[int], num_texts: int) -> Iterator[str]:
    """Yield texts of many kinds whose non-ASCII code points are all in `allowed`."""
    rng = random.Random(seed)
    removed = dict.fromkeys(_fixed_code_points().difference(allowed))
    for number in range(num_texts):
        pieces = [_KINDS[number % len(_KINDS)](rng, allowed)]
        pieces += [rng.choice(_KINDS)(rng, allowed) for _ in range(rng.randrange(3))]
        joint = rng.choice(("", " ", "\n", "\n\n", ". "))
        yield joint.join(pieces).translate(removed)


@functools.cache
def _fixed_code_points() -> frozenset[int]:
    """Return the non-ASCII code points that random texts contain besides those allowed."""
    texts = [SPACES, DIGITS, MARKS, JAMO, SYMBOLS, APOSTROPHES, *CONTRACTIONS, *CONTROLS, *CODE]
    texts += [*AROUND_SPACES, *BEFORE_APOSTROPHES, *AFTER_CONTRACTIONS, *BASES, *LONG]
    texts += [change(each) for each in SENTENCES for change in CHANGES]
    return frozenset(map(ord, "".join(texts))) - frozenset(range(128))


def _alternating(*parts: Sequence[str]) -> str:
    """Join the first text of each of the parts, then the second of each, and so on."""
    return "".join(itertools.chain(*zip(*parts, strict=True)))


def _script(rng: random.Random, allowed: Sequence[int]) -> str:
    start = rng.randrange(len(allowed))
    letters = allowed[start : start + rng.choice((8, 40, 200))]
    words = ["".join(map(chr, rng.choices(letters, k=rng.randint(1, 9)))) for _ in range(8)]
    return _alternating(words, rng.choices((" ", " ", ", ", ".", "-", "'s ", "\n"), k=8))


def _any(rng: random.Random, allowed: Sequence[int]) -> str:
    length = rng.randint(1, 60)
    drawn = map(chr, rng.choices(allowed, k=length))
    return "".join(
        one if is_allowed else other
        for one, other, is_allowed in zip(
            drawn, rng.choices(ASCII, k=length), rng.choices(SIX_OF_TEN, k=length), strict=True
        )
    )


def _spaces(rng: random.Random, _: Sequence[int]) -> str:
    few = rng.sample(SPACES, 3)
    runs = ["".join(rng.choices(few, k=rng.choice((1, 2, 3, 8, 30)))) for _ in range(6)]
    return _alternating(runs, rng.choices(AROUND_SPACES, k=6))


def _contractions(rng: random.Random, _: Sequence[int]) -> str:
    return _alternating(
        rng.choices(BEFORE_APOSTROPHES, k=12),
        rng.choices(APOSTROPHES, k=12),
        rng.choices(CONTRACTIONS, k=12),
        rng.choices(AFTER_CONTRACTIONS, k=12),
    )


def _digits(rng: random.Random, _: Sequence[int]) -> str:
    numbers = [
        "".join(rng.choices(DIGITS if rng.random() < 0.4 else DIGITS[:10], k=rng.randint(1, 20)))
        for _ in range(8)
    ]
    return _alternating(numbers, rng.choices((" ", ",", ".", "a", "-", "", "\n"), k=8))


def _controls(rng: random.Random, _: Sequence[int]) -> str:
    length = rng.randint(1, 30)
    return _alternating(rng.choices(CONTROLS, k=length), rng.choices("ab 1\n", k=length))


def _long_word(rng: random.Random, allowed: Sequence[int]) -> str:
    length = rng.choice((60, 200, 600))
    if rng.random() < 0.5:
        return rng.choice(LONG) * length
    return "".join(rng.choices("abcdefXYZ0123_/+", k=length)) + chr(rng.choice(allowed))


def _marks(rng: random.Random, allowed: Sequence[int]) -> str:
    bases = (*BASES, *map(chr, rng.choices(allowed, k=3)))
    marked = ["".join(rng.choices(MARKS + JAMO, k=rng.randint(1, 4))) for _ in range(10)]
    return _alternating(rng.choices(bases, k=10), marked)


def _symbols(rng: random.Random, _: Sequence[int]) -> str:
    runs = ["".join(rng.choices(SYMBOLS, k=rng.randint(1, 6))) for _ in range(8)]
    return _alternating(runs, rng.choices(("", " ", "\n", "a", "\r\n"), k=8))


def _sentence(rng: random.Random, _: Sequence[int]) -> str:
    text = rng.choice(SENTENCES)
    cut = rng.randrange(len(text)) if rng.random() < 0.5 else 0
    return rng.choice(CHANGES)(text[cut:] + text[:cut])


def _code(rng: random.Random, _: Sequence[int]) -> str:
    return rng.choice(CODE) * rng.randint(1, 2)


_KINDS: tuple[Make, ...] = (
    _script, _any, _spaces, _contractions, _digits, _controls, _long_word, _marks, _symbols,
    _sentence, _code, _script, _any,
)  # fmt: skip
