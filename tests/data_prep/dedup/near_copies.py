"""Documents with planted near-duplicates, and their similarities by brute force.

Independent of data_prep: words, shingles and similarities are computed in the slow and obvious way,
over all pairs.
"""

import json
import random
import re
import unicodedata
from itertools import combinations
from pathlib import Path

import pyarrow as pa

from tests.manual import topics


def words_of(text: str) -> list[str]:
    """Return words as docs/deduplication.md defines them, one character at a time."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    found, word = [], ""
    for character in text:
        category = unicodedata.category(character)
        if category == "Cf":
            continue
        in_word = category[0] in "LMN"
        unspaced = in_word and re.match(r"CJK|HIRAGANA|KATAKANA|THAI", unicodedata.name(character))
        if in_word and not unspaced:
            word += character
            continue
        found += [word] if word else []
        found += [character] if unspaced else []
        word = ""
    return found + [word] * bool(word)


def shingles_of(text: str, length: int = 13) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def similar_pairs(texts: list[str], threshold: float) -> dict[tuple[int, int], float]:
    """Return {(i, j): Jaccard index} of all pairs at or above the threshold, by brute force."""
    sets = [shingles_of(text) for text in texts]
    found = {}
    for one, two in combinations(range(len(texts)), 2):
        if sets[one] and sets[two]:
            common = len(sets[one] & sets[two])
            if common and common / len(sets[one] | sets[two]) >= threshold:
                found[one, two] = common / len(sets[one] | sets[two])
    return found


def edited(words: list[str], num_edits: int, generator: random.Random) -> list[str]:
    """Replace, remove or insert `num_edits` words, at random places."""
    words = list(words)
    for _ in range(num_edits):
        place = generator.randrange(len(words))
        kind = generator.randrange(3)
        words[place : place + (kind != 2)] = [] if kind == 1 else [f"x{generator.randrange(10**6)}"]
    return words


def planted_texts(num_models: int, copies: int, seed: int = 0) -> list[str]:
    """Return texts of the manual, and edited copies of each, shuffled."""
    generator = random.Random(seed)
    manual = " ".join(topics[name] for name in sorted(topics)).split()
    texts = []
    for number in range(num_models):
        length = generator.choice((60, 150, 400))
        start = number * 400 % (len(manual) - 400)
        model = manual[start : start + length]
        texts.append(" ".join(model))
        for _ in range(copies):
            num_edits = generator.randrange(0, max(2, length // 25))
            texts.append(" ".join(edited(model, num_edits, generator)))
    generator.shuffle(texts)
    return texts


def write_documents(path: Path, texts: list[str], first: int = 0) -> Path:
    """Write JSON lines with ids and a further key, compressed if the name says so."""
    lines = [
        json.dumps({"id": f"d{number}", "source": "s", "text": text, "n": number / 3})
        for number, text in enumerate(texts, first)
    ]
    content = ("\n".join(lines) + "\n" * bool(lines)).encode()
    if path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as stream:
            stream.write(content)
    else:
        path.write_bytes(content)
    return path
