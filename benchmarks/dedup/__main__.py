"""Recall, precision and cost of deduplication, compared with brute force and with peers.

    python -m benchmarks.dedup [--accuracy 1500] [--growth 2000,20000,200000] [--workers 2]

Accuracy: windows of real text (Python's standard library) and an edited copy of each, with a
Jaccard index of 13-word shingles from 0.5 to 1. The reference is the exact index of all pairs. The
contenders find pairs of duplicates at 0.8, with 13-word shingles: `data_prep dedup`, datasketch's
MinHashLSH (128 permutations), and datatrove's MinHash (14 x 8; it splits words differently, so its
exact index differs a little).

Growth: documents of random lines of the same text, a tenth of them edited copies. Each run is a
new process; its memory is the largest resident set of any of its processes, from the kernel.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

from benchmarks.dedup.contenders import DATASKETCH, dedup_command, found_pairs, measured
from benchmarks.dedup.texts import (
    THRESHOLD,
    accuracy_texts,
    all_similarities,
    growth_corpus,
    real_text,
    write_jsonl,
)
from benchmarks.machine import processor
from benchmarks.tables import parser, show, table

BINS = [0.0, 0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.01]


def accuracy(count: int, lines: list[str], work: Path, peer_seconds: float) -> list[str]:
    """Return which share of pairs each contender calls duplicates, by Jaccard index."""
    texts = accuracy_texts(lines, count, random.Random(1))
    corpus = work / "accuracy.jsonl"
    write_jsonl(corpus, texts)
    truth = all_similarities(texts)
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


def growth(
    counts: list[int], lines: list[str], workers: int, max_datasketch: int, work: Path
) -> str:
    """Return seconds and memory for growing corpora, with datasketch up to `max_datasketch`."""
    rows = []
    for count in counts:
        corpus, output = work / f"{count}.jsonl", work / f"out-{count}"
        size = growth_corpus(corpus, lines, count)
        ours = dedup_command(corpus, output, workers, "--memory", str(1 << 28))
        seconds, peak = measured(ours)
        manifest = json.loads((output / "stage.json").read_text())
        dropped = sum(Counter(manifest["dropped"]).values())
        row = [f"{count:,}", f"{size / 1e6:.1f}", f"{dropped:,}", f"{seconds:.1f}"]
        row += [f"{size / 1e6 / seconds:.1f}", f"{peak:.0f}"]
        if count <= max_datasketch:
            theirs = [sys.executable, "-c", DATASKETCH, str(corpus), str(work / "pairs.json")]
            their_seconds, their_peak = measured(theirs)
            row += [f"{their_seconds:.1f}", f"{their_peak:.0f}"]
        else:
            row += ["not run", ""]
        rows.append(row)
        print(*row, flush=True)
        corpus.unlink()
    head = [
        "documents", "MB", "dropped", "seconds", "MB/s", "peak MiB of a process", "datasketch s",
        "datasketch peak MiB",
    ]  # fmt: skip
    return table(head, rows)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--accuracy", type=int, default=1500, help="documents; 0: leave it out")
    flags.add_argument("--growth", default="2000,20000,200000", help="documents, one number a run")
    flags.add_argument("--datasketch", type=int, default=20_000, help="most documents for it")
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--peer_seconds", type=float, default=600, help="limit for datatrove")
    options = flags.parse_args()
    lines, paragraphs = real_text(), []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if options.accuracy:
            paragraphs += accuracy(options.accuracy, lines, work, options.peer_seconds)
        if options.growth:
            counts = [int(count) for count in options.growth.split(",")]
            paragraphs.append(growth(counts, lines, options.workers, options.datasketch, work))
    show(paragraphs, processor(), options.output)


if __name__ == "__main__":
    main()
