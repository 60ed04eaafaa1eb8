"""Splits texts into words and hashes words and word n-grams, for dedup and decontaminate.

A text is normalised (NFKC, case folded, NFKC again), invisible characters (Unicode's Cf) are
removed, and the rest is split: a word is a sequence of letters, marks and digits (L, M, N), and
each character of a script that is written without spaces (Chinese, Japanese, Thai, ...) is a word
of its own. Everything else separates words. Case, punctuation, spacing and line breaks are
therefore ignored.

numpy hashes many documents at a time: a Python loop over words would cost more than the rest of
deduplication. Hashes are stable across versions and machines, so they can be stored in files.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

BATCH_CHARACTERS = 1 << 18  # hashed at a time: 8 bytes per character fit in the CPU cache
_CHARACTER_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_WORD_BASE = 0xD6E8FEB86659FD93
_SEPARATOR, _IN_WORD, _SINGLE_WORD, _INVISIBLE = range(4)  # kinds of characters
_UNSPACED = (  # scripts written without spaces
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Chinese characters, extension A
    (0x4E00, 0x9FFF),  # Chinese characters
    (0xF900, 0xFAFF),  # Chinese compatibility characters
    (0x20000, 0x3FFFF),  # Chinese characters, other extensions
)


def normalise(text: str) -> str:
    """Return the normalised text, including its separators."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def split_words(text: str) -> list[str]:
    """Return the words of a text. This is slow, so it is used only on texts whose hashes match."""
    word, invisible = _patterns()
    return word.findall(invisible.sub("", normalise(text)))


def hash_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the word hashes of all texts, (W,) uint64, and where each text's hashes end, (D,)
    int64.
    """
    hashes = [np.empty(0, np.uint64)]
    counts = np.zeros(len(texts), np.int64)
    for numbers, pieces in _batches(texts):
        piece_hashes, ends = _hash_batch(pieces)
        hashes.append(piece_hashes)
        np.add.at(counts, numbers, np.diff(ends, prepend=0))
    return np.concatenate(hashes), np.cumsum(counts)


def hash_ngrams(words: np.ndarray, ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all n-grams, (N,) uint64, and where each text's hashes end, (D,) int64.

    An n-gram consists of `length` consecutive words of one text.

    Args:
        words, ends: as returned by `hash_words`.
    """
    counts = np.maximum(np.diff(ends, prepend=0) - (length - 1), 0)
    if len(words) < length:
        return np.empty(0, np.uint64), np.cumsum(counts)
    powers, inverse = _powers(_WORD_BASE, len(words))
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words * powers[: len(words)], out=sums[1:])
    inside = np.ones(len(words) - length + 1, bool)
    starts = ends - np.diff(ends, prepend=0)
    for words_left in range(1, length):  # too few words remain in the text
        crossing = ends - words_left
        crossing = crossing[(crossing >= starts) & (crossing < len(inside))]
        inside[crossing] = False
    first = np.flatnonzero(inside)
    return mix((sums[first + length] - sums[first]) * inverse[first]), np.cumsum(counts)


def mix(values: np.ndarray) -> np.ndarray:
    """Apply a bijection to (N,) uint64 in which every input bit affects all output bits.

    Source: splitmix64 (Steele, Lea, Flood, 2014).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _batches(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Yield batches as (text indices, normalised pieces); a long text forms several pieces."""
    numbers: list[int] = []
    pieces: list[str] = []
    size = 0
    for number, text in enumerate(texts):
        for piece in _pieces(text):
            numbers.append(number)
            pieces.append(normalise(piece))
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield numbers, pieces
                numbers, pieces, size = [], [], 0
    if pieces:
        yield numbers, pieces


def _pieces(text: str) -> Iterator[str]:
    """Split a long text at spaces, which are never inside words and do not affect normalisation."""
    start = 0
    while len(text) - start > 2 * BATCH_CHARACTERS:
        space = _SPACE.search(text, start + BATCH_CHARACTERS)
        if space is None:
            break
        yield text[start : space.start()]
        start = space.start()
    yield text[start:] if start else text


def _hash_batch(pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the word hashes of all pieces, and the index at which each piece's hashes end.

    The hash of a word is a polynomial in its characters: the sum of value * base^position over the
    batch, divided by the power at the word's start.
    """
    joined = "\n".join(pieces)
    kinds, values = _tables()
    if joined.isascii():
        codes = np.frombuffer(joined.encode("ascii"), np.uint8)
    else:
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    piece_ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)) + 1) - 1
    kind = kinds[codes]
    visible = kind != _INVISIBLE
    if not visible.all():
        piece_ends = np.append(0, np.cumsum(visible))[piece_ends]
        codes, kind = codes[visible], kind[visible]
    begins = kind == _IN_WORD
    begins[1:] &= kind[:-1] != _IN_WORD
    begins |= kind == _SINGLE_WORD
    starts = np.flatnonzero(begins)
    ends = np.searchsorted(starts, piece_ends)
    if not len(starts):
        return np.empty(0, np.uint64), ends
    powers, inverse = _powers(_CHARACTER_BASE, len(codes))
    # Separators have the value 0, so that each sum may extend to the start of the next word.
    sums = np.add.reduceat(values[codes] * powers[: len(codes)], starts)
    return mix(sums * inverse[starts]), ends


_cached_powers: dict[int, tuple[np.ndarray, np.ndarray]] = {}


def _powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at least `count` powers of the base, and as many of its inverse, modulo 2^64."""
    cached = _cached_powers.get(base)
    if cached is None or len(cached[0]) < count:
        size = 1 << max(16, int(count).bit_length())
        both = []
        for factor in (base, pow(base, -1, 1 << 64)):
            powers = np.full(size, factor, np.uint64)
            powers[0] = 1
            both.append(np.multiply.accumulate(powers))
        cached = (both[0], both[1])
        if size <= 8 * BATCH_CHARACTERS:  # do not cache the powers for a giant document
            _cached_powers[base] = cached
    return cached


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Return each code point's kind, and its value in word hashes; both have shape (0x110000,)."""
    names = "".join(unicodedata.category(chr(code)) for code in range(0x110000))
    categories = np.frombuffer(names.encode(), "S2")
    kinds = np.full(0x110000, _SEPARATOR, np.uint8)
    kinds[np.isin(categories.astype("S1"), [b"L", b"M", b"N"])] = _IN_WORD
    kinds[categories == b"Cf"] = _INVISIBLE
    for low, high in _UNSPACED:
        block = kinds[low : high + 1]
        block[block == _IN_WORD] = _SINGLE_WORD
    values = mix(np.arange(1, 0x110001, dtype=np.uint64) * np.uint64(_CHARACTER_BASE))
    values[(kinds == _SEPARATOR) | (kinds == _INVISIBLE)] = 0
    return kinds, values


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two regular expressions: one matches a word, the other an invisible character."""
    kinds, _ = _tables()
    in_word, single, invisible = (
        _character_class(kinds == kind) for kind in (_IN_WORD, _SINGLE_WORD, _INVISIBLE)
    )
    return re.compile(f"{single}|{in_word}+"), re.compile(invisible)


def _character_class(chosen: np.ndarray) -> str:
    """Return a regular expression that matches the code points selected by (0x110000,) bool."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    ranges = [f"\\U{low:08x}-\\U{high - 1:08x}" for low, high in edges.reshape(-1, 2).tolist()]
    return f"[{''.join(ranges)}]"


_SPACE = re.compile(r"\s")
