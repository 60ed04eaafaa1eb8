"""Test texts on which two encoders must agree before one may replace the other.

The texts cover all cases in which encoders have been found to differ: rare and unassigned code
points, case folding after apostrophes, runs of white space, digits, normalization, and special
tokens that are spelled out. The same seed and code points produce the same texts. Independent of
encoders.
"""

import itertools
import random
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

# Code points that are used but not assigned in this Python's Unicode tables: private use, new
# emoji.
EXTRA_CODE_POINTS = (range(0xE000, 0xF900), range(0x1F000, 0x1FB00))
PLAIN_LETTERS = (range(0x3400, 0xA000), range(0xAC00, 0xD7A4), range(0x20000, 0x323B0))
SPACES = (
    " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f"
    "\u205f\u2060\u3000\ufeff"
)
DIGITS = "0123456789٠١٢٣४५६๑๒３４５²³¹½¾Ⅷ①𝟘𝟙"
MARKS = "\u0300\u0301\u0308\u0327\u0338\u0345\u05b4\u0651\u093f\u094d\u0e31\u200c\u200d\ufe0f\u20e3"
CONTRACTIONS = (
    "s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "Ve", "M", "lL", "D", "ſ", "K",
)  # fmt: skip
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
    likely.update(
        number
        for number in range(0x80, 0x110000)
        if unicodedata.category(chr(number)) not in ("Cn", "Co", "Cs")
    )
    return sorted(likely)


def code_point_text(number: int) -> str:
    """Return a text in which a code point occurs next to letters, digits, spaces, apostrophes and
    marks.
    """
    one = chr(number)
    if any(number in plain for plain in PLAIN_LETTERS):  # 100,000 letters with the same properties
        return f"a{one} {one}1"
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


def vocabulary_texts(tokens: Iterable[str]) -> Iterator[str]:
    """Yield a text for each token: the token as a word, repeated, and inside words."""
    for token in tokens:
        yield f"{token} {token}{token}x{token}\n{token.upper()} {token[:-1]} "


def random_texts(seed: int, allowed: Sequence[int], num_texts: int) -> Iterator[str]:
    """Yield texts of many kinds whose non-ASCII code points are all in `allowed`."""
    rng = random.Random(seed)
    allowed_set = set(allowed)
    for number in range(num_texts):
        pieces = [_KINDS[number % len(_KINDS)](rng, allowed)]
        pieces += [rng.choice(_KINDS)(rng, allowed) for _ in range(rng.randrange(3))]
        joint = rng.choice(("", " ", "\n", "\n\n", ". "))
        text = joint.join(pieces)
        yield "".join([one for one in text if one < "\x80" or ord(one) in allowed_set])


def _script(rng: random.Random, allowed: Sequence[int]) -> str:
    start = rng.randrange(len(allowed))
    letters = allowed[start : start + rng.choice((8, 40, 200))]
    words = ["".join(chr(rng.choice(letters)) for _ in range(rng.randint(1, 9))) for _ in range(8)]
    return "".join(word + rng.choice((" ", " ", ", ", ".", "-", "'s ", "\n")) for word in words)


def _any(rng: random.Random, allowed: Sequence[int]) -> str:
    return "".join(
        chr(rng.choice(allowed)) if rng.random() < 0.6 else chr(rng.randrange(128))
        for _ in range(rng.randint(1, 60))
    )


def _spaces(rng: random.Random, _: Sequence[int]) -> str:
    few = rng.sample(SPACES, 3)
    runs = ["".join(rng.choices(few, k=rng.choice((1, 2, 3, 8, 30)))) for _ in range(6)]
    return "".join(run + rng.choice(("a", "x1", "", "é", ".", "{", "中")) for run in runs)


def _contractions(rng: random.Random, _: Sequence[int]) -> str:
    return "".join(
        rng.choice(("I", "we", "o", "", " ", "ſ", "é", "1", "(")) + rng.choice(APOSTROPHES)
        + rng.choice(CONTRACTIONS) + rng.choice(("", " ", "x", "'", "1", "é", "\u0301"))
        for _ in range(12)
    )  # fmt: skip


def _digits(rng: random.Random, _: Sequence[int]) -> str:
    numbers = (
        "".join(rng.choices(DIGITS if rng.random() < 0.4 else DIGITS[:10], k=rng.randint(1, 20)))
        for _ in range(8)
    )
    return "".join(number + rng.choice((" ", ",", ".", "a", "-", "", "\n")) for number in numbers)


def _controls(rng: random.Random, _: Sequence[int]) -> str:
    return "".join(
        chr(rng.choice((rng.randrange(32), 127, rng.randrange(128, 160)))) + rng.choice("ab 1\n")
        for _ in range(rng.randint(1, 30))
    )


def _long_word(rng: random.Random, allowed: Sequence[int]) -> str:
    length = rng.choice((60, 200, 600))
    if rng.random() < 0.5:
        return rng.choice(("a", "ab", "=", "-", " ", "\n", "0", "é", "ha")) * length
    return "".join(rng.choices("abcdefXYZ0123_/+", k=length)) + chr(rng.choice(allowed))


def _marks(rng: random.Random, allowed: Sequence[int]) -> str:
    return "".join(
        rng.choice(("e", "A", "o", " ", "1", chr(rng.choice(allowed)), "ᄀ", "가"))
        + "".join(rng.choices(MARKS + "\u1161\u11a8", k=rng.randint(1, 4)))
        for _ in range(10)
    )


def _symbols(rng: random.Random, _: Sequence[int]) -> str:
    return "".join(
        "".join(rng.choices(SYMBOLS, k=rng.randint(1, 6)))
        + rng.choice(("", " ", "\n", "a", "\r\n"))
        for _ in range(8)
    )


def _sentence(rng: random.Random, _: Sequence[int]) -> str:
    text = rng.choice(SENTENCES)
    change = rng.randrange(6)
    if change == 0:
        return text.upper()
    if change == 1:
        return unicodedata.normalize(rng.choice(("NFC", "NFD", "NFKC", "NFKD")), text)
    if change == 2:
        cut = rng.randrange(len(text))
        return text[cut:] + text[:cut]
    return text


def _code(rng: random.Random, _: Sequence[int]) -> str:
    return rng.choice(CODE) * rng.randint(1, 2)


_KINDS: tuple[Make, ...] = (
    _script, _any, _spaces, _contractions, _digits, _controls, _long_word, _marks, _symbols,
    _sentence, _code, _script, _any,
)  # fmt: skip
