"""Corpora of real text with near-duplicates, and which documents are duplicates of which."""

import json
import random
import re
import sysconfig
from itertools import combinations
from pathlib import Path

SHINGLE_WORDS = 13
THRESHOLD = 0.8


def real_text() -> list[str]:
    """Return the distinct lines of the standard library that have more than three words."""
    root = Path(sysconfig.get_paths()["stdlib"])
    lines: dict[str, None] = {}
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts:
            for line in path.read_text(encoding="utf-8", errors="ignore").splitlines():
                if len(line.split()) > 3:
                    lines[line.strip()] = None
    return list(lines)


def words_of(text: str) -> list[str]:
    """Return the words of a text, which is ASCII in this benchmark."""
    return re.findall(r"[a-z0-9]+", text.lower())


def shingles_of(text: str) -> frozenset[tuple[str, ...]]:
    """Return the set of all runs of 13 words."""
    words = words_of(text)
    return frozenset(tuple(words[i : i + 13]) for i in range(len(words) - SHINGLE_WORDS + 1))


def edited(text: str, num_edits: int, generator: random.Random) -> str:
    """Replace words at random places."""
    words = words_of(text)
    for _ in range(num_edits):
        words[generator.randrange(len(words))] = f"edit{generator.randrange(10**6)}"
    return " ".join(words)


def accuracy_texts(lines: list[str], count: int, generator: random.Random) -> list[str]:
    """Return windows of text and an edited copy of each, with similarities from 0.4 to 1."""
    words = words_of(" ".join(lines).encode("ascii", "ignore").decode())
    texts = []
    for number in range(count // 2):
        length = generator.choice((200, 400, 800))
        text = " ".join(words[number * 800 : number * 800 + length])
        similarity = generator.uniform(
            0.45, 1.02
        )  # about (S - 13 e) / (S + 13 e), with S shingles and e edits
        affected = (length - 12) * (1 - similarity) / (1 + similarity)
        copy = edited(text, max(0, round(affected / 13)), generator)
        texts += [text + ".", copy.upper() if number % 2 else copy]
    generator.shuffle(texts)
    return texts


def all_similarities(texts: list[str]) -> dict[tuple[int, int], float]:
    """Return {pair: exact Jaccard index} of all pairs that share a shingle, by brute force."""
    numbers: dict[tuple[str, ...], int] = {}
    sets = [{numbers.setdefault(s, len(numbers)) for s in shingles_of(text)} for text in texts]
    found = {}
    for one, two in combinations(range(len(texts)), 2):
        if not sets[one].isdisjoint(sets[two]):
            common = len(sets[one] & sets[two])
            found[one, two] = common / (len(sets[one]) + len(sets[two]) - common)
    return found


def write_jsonl(path: Path, texts: list[str], first: int = 0) -> None:
    """Write documents with their numbers as IDs."""
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(texts, first):
            file.write(json.dumps({"id": number, "text": text}) + "\n")


def growth_corpus(path: Path, lines: list[str], count: int) -> int:
    """Write documents of random lines, a tenth of them edited copies of earlier ones."""
    generator = random.Random(2)
    texts: list[str] = []
    for number in range(count):
        if number % 10 == 9:
            text = edited(texts[generator.randrange(number)], generator.randrange(2), generator)
        else:
            text = " ".join(generator.choices(lines, k=12))
        texts.append(text)
    write_jsonl(path, texts)
    return sum(map(len, texts))
