"""Recall, precision and cost of deduplication, compared with brute force and with peers.

    python -m benchmarks.dedup [--documents 1500]

Documents are windows of real text (Python's standard library) and an edited copy of each, with a
Jaccard index of 13-word shingles from 0.5 to 1. The reference is the exact Jaccard index of all
pairs. The contenders find pairs of duplicates at 0.8, with 13-word shingles: `data_prep dedup`,
datasketch's MinHashLSH (128 permutations), and datatrove's MinHash (14 x 8; it splits words
differently, so its exact index differs a little).
"""

import json
import random
import re
import sysconfig
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks import require
from benchmarks.dedup.contenders import found_pairs
from benchmarks.machine import processor
from benchmarks.tables import parser, show, table
from tests.data_prep.dedup.near_copies import similar_pairs

THRESHOLD = 0.8
BINS = [0.0, 0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.01]


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


def write_jsonl(path: Path, texts: list[str]) -> None:
    """Write documents with their numbers as IDs."""
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": number, "text": text}) + "\n")


def accuracy(count: int, lines: list[str], work: Path, peer_seconds: float) -> list[str]:
    """Return which share of pairs each contender calls duplicates, by Jaccard index."""
    texts = accuracy_texts(lines, count, random.Random(1))
    corpus = work / "accuracy.jsonl"
    write_jsonl(corpus, texts)
    truth = similar_pairs(texts, 0)  # all that share a shingle
    contenders = found_pairs(corpus, work, peer_seconds)
    rows: list[list[object]] = []
    for low, high in pairwise(BINS):
        pairs = {pair for pair, similarity in truth.items() if low <= similarity < high}
        if pairs:
            shown = "1" if low == 1 else f"{low:g} to {high:g}"
            shares = [f"{len(pairs & found) / len(pairs):.3f}" for found, _ in contenders.values()]
            rows.append([shown, len(pairs), *shares])
    similar = {pair for pair, similarity in truth.items() if similarity >= THRESHOLD}
    right = [(len(similar & found), len(found)) for found, _ in contenders.values()]
    recall = [f"**{both / len(similar):.4f}**" for both, _ in right]
    precision = [f"**{both / max(1, called):.4f}**" for both, called in right]
    rows.append(["recall at 0.8", len(similar), *recall])
    rows.append(["precision at 0.8", "", *precision])
    seconds = [f"{seconds:.1f}" for _, seconds in contenders.values()]
    rows.append(["seconds, one process", "", *seconds])
    return [
        f"{len(texts):,} documents, {len(texts) * (len(texts) - 1) // 2:,} pairs by brute force, "
        f"{len(truth):,} share a shingle.",
        table(["Jaccard index", "pairs", *contenders], rows),
    ]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--documents", type=int, default=1500)
    flags.add_argument("--peer_seconds", type=float, default=600, help="limit for datatrove")
    options = flags.parse_args()
    require("rensa", "datatrove", "orjson")
    require("datasketch", install=".venv/bin/python -m pip install datasketch==2.0.0")
    with tempfile.TemporaryDirectory() as work:
        found = accuracy(options.documents, real_text(), Path(work), options.peer_seconds)
    show(found, processor(), options.output)


if __name__ == "__main__":
    main()
