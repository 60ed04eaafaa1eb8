"""Recall, precision and cost of deduplication, compared with brute force and with peers.

    python -m benchmarks.dedup [--accuracy 1500] [--growth 2000,20000,200000] [--workers 2]
    python -m benchmarks.dedup --accuracy 0 --growth "" --snapshots 5000

Accuracy: windows of real text (Python's standard library) and an edited copy of each, with a
Jaccard index of 13-word shingles from 0.5 to 1. The reference is the exact index of all pairs. The
contenders find pairs of duplicates at 0.8, with 13-word shingles: `data_prep dedup`, datasketch's
MinHashLSH (128 permutations), and datatrove's MinHash (14 x 8; it splits words differently, so its
exact index differs a little).

Snapshots: the documents in four parts, each compared with the signatures of those before it. The
references are one pass over all of them, and brute force: the exact index of all pairs, in order.

Growth: documents of random lines of the same text, a tenth of them edited copies. Each run is a
new process; its memory is the largest resident set of any of its processes, from the kernel.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

from benchmarks.dedup.contenders import (
    DATASKETCH,
    dedup_command,
    found_pairs,
    kept_ids,
    measured,
    timed,
)
from benchmarks.dedup.texts import (
    THRESHOLD,
    accuracy_texts,
    all_similarities,
    growth_corpus,
    keep_by_brute_force,
    real_text,
    write_jsonl,
)

BINS = [0.0, 0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.01]


def show_accuracy(count: int, lines: list[str], work: Path, peer_seconds: float) -> None:
    """Print which share of pairs each contender calls duplicates, by Jaccard index."""
    texts = accuracy_texts(lines, count, random.Random(1))
    corpus = work / "accuracy.jsonl"
    write_jsonl(corpus, texts)
    start = time.perf_counter()
    truth = all_similarities(texts)
    print(
        f"{len(texts):,} documents, {len(texts) * (len(texts) - 1) // 2:,} pairs by brute force in "
        f"{time.perf_counter() - start:.0f} s, {len(truth):,} share a shingle\n",
        flush=True,
    )
    contenders = found_pairs(corpus, work, peer_seconds)
    print(f"| Jaccard index | pairs | {' | '.join(contenders)} |")
    print("|---|" + "---|" * (len(contenders) + 1))
    for low, high in pairwise(BINS):
        pairs = {pair for pair, similarity in truth.items() if low <= similarity < high}
        if pairs:
            row = [f"{len(pairs & found) / len(pairs):.3f}" for found, _ in contenders.values()]
            shown = "1" if low == 1 else f"{low:g} to {high:g}"
            print(f"| {shown} | {len(pairs)} | {' | '.join(row)} |")
    similar = {pair for pair, similarity in truth.items() if similarity >= THRESHOLD}
    row = [f"**{len(similar & found) / len(similar):.4f}**" for found, _ in contenders.values()]
    print(f"| recall at 0.8 | {len(similar)} | {' | '.join(row)} |")
    row = [
        f"**{len(similar & found) / max(1, len(found)):.4f}**" for found, _ in contenders.values()
    ]
    print(f"| precision at 0.8 | | {' | '.join(row)} |")
    row = [f"{seconds:.1f}" for _, seconds in contenders.values()]
    print(f"| seconds, one process | | {' | '.join(row)} |\n", flush=True)


def show_snapshots(count: int, lines: list[str], workers: int, work: Path) -> None:
    """Print what four snapshots keep, one after the other, and what their signatures cost."""
    more_lines = random.Random(6).choices(lines, k=count * 80)  # enough words
    texts = accuracy_texts(more_lines, count - count // 20, random.Random(3))
    texts += random.Random(4).choices(texts, k=count - len(texts))
    random.Random(5).shuffle(texts)
    write_jsonl(work / "all.jsonl", texts)
    one_seconds = timed(dedup_command(work / "all.jsonl", work / "all", workers))
    one_pass = kept_ids(work / "all")
    print(f"{len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} MB; one pass over all: ")
    print(f"{len(one_pass):,} kept, {one_seconds:.1f} s\n", flush=True)
    print("| snapshot | documents | MB | kept | seconds | MB of signatures | bytes per document |")
    print("|---|---|---|---|---|---|---|", flush=True)
    done: list[str] = []
    kept: list[int] = []
    numbers = list(range(len(texts)))
    for part in range(4):
        own = numbers[part * len(texts) // 4 : (part + 1) * len(texts) // 4]
        corpus, output = work / f"part{part}.jsonl", work / f"part{part}"
        write_jsonl(corpus, [texts[number] for number in own], own[0])
        more = ["--keep_signatures", "on"] + (["--against", *done] if done else [])
        seconds = timed(dedup_command(corpus, output, workers, *more))
        new = kept_ids(output)
        size = sum(p.stat().st_size for p in (output / "signatures").rglob("*") if p.is_file())
        own_mb = sum(len(texts[number]) for number in own) / 1e6
        print(
            f"| {part} | {len(own):,} | {own_mb:.1f} | {len(new):,} | {seconds:.1f} | "
            f"{size / 1e6:.1f} | {size / len(own):,.0f} |",
            flush=True,
        )
        kept += new
        done.append(str(output))
    start = time.perf_counter()
    expected = keep_by_brute_force(texts)
    print(
        f"\nbrute force over all pairs: {len(expected):,} kept, {time.perf_counter() - start:.0f} s"
    )
    print(f"snapshots equal one pass: {kept == one_pass}; equal brute force: {kept == expected}")
    differing = sorted(set(kept) ^ set(expected))
    print(f"documents decided differently from brute force: {differing}", flush=True)


def show_growth(
    counts: list[int], lines: list[str], workers: int, max_datasketch: int, work: Path
) -> None:
    """Print seconds and memory for growing corpora, with datasketch up to `max_datasketch`."""
    head = (
        "documents",
        "MB",
        "dropped",
        "seconds",
        "MB/s",
        "peak MiB of a process",
        "datasketch s",
    )
    print(f"| {' | '.join(head)} | datasketch peak MiB |")
    print("|---|" + "---|" * len(head))
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
        print(f"| {' | '.join(row)} |", flush=True)
        corpus.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dedup", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--accuracy", type=int, default=1500, help="number of documents; 0: leave it out"
    )
    parser.add_argument(
        "--growth", default="2000,20000,200000", help="numbers of documents, one per run"
    )
    parser.add_argument(
        "--datasketch", type=int, default=20_000, help="maximum number of documents for datasketch"
    )
    parser.add_argument(
        "--snapshots", type=int, default=0, help="number of documents in four snapshots; 0: none"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--peer_seconds", type=float, default=600, help="time limit for datatrove in seconds"
    )
    options = parser.parse_args()
    lines = real_text()
    with tempfile.TemporaryDirectory() as name:
        if options.accuracy:
            show_accuracy(options.accuracy, lines, Path(name), options.peer_seconds)
        if options.snapshots:
            show_snapshots(options.snapshots, lines, options.workers, Path(name))
        if options.growth:
            counts = [int(count) for count in options.growth.split(",")]
            show_growth(counts, lines, options.workers, options.datasketch, Path(name))


if __name__ == "__main__":
    main()
