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
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

SHINGLE_WORDS = 13
THRESHOLD = 0.8
BINS = [0.0, 0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.01]
DATASKETCH = """
import json, re, sys
from datasketch import MinHash, MinHashLSH
lsh = MinHashLSH(threshold=0.8, num_perm=128)
pairs = []
for number, line in enumerate(open(sys.argv[1])):
    words = re.findall(r"\\w+", json.loads(line)["text"].lower())
    shingles = {" ".join(words[i : i + 13]).encode() for i in range(len(words) - 12)}
    if not shingles:
        continue
    signature = MinHash(num_perm=128)
    signature.update_batch(shingles)
    pairs += [[other, number] for other in lsh.query(signature)]
    lsh.insert(number, signature)
json.dump(pairs, open(sys.argv[2], "w"))
"""
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import *
from datatrove.pipeline.readers import JsonlReader
from datatrove.utils.hashing import HashConfig
corpus, work = sys.argv[1:3]
# it passes a str to its default hash, xxhash, which xxhash 4 refuses
config = MinhashConfig(n_grams=13, hash_config=HashConfig(hash_fc="sha1"))
for pipeline, tasks in (
    ([JsonlReader(corpus), MinhashDedupSignature(work + "/signatures", config)], 1),
    ([MinhashDedupBuckets(work + "/signatures", work + "/buckets", config=config)], 14),
):
    LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{work}/log{tasks}").run()
"""


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


def timed(command: list[str], limit_seconds: float = 3600) -> float:
    """Run a command; return its seconds. Raises subprocess.TimeoutExpired."""
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    return time.perf_counter() - start


def dedup_command(corpus: Path, output: Path, workers: int, *more: str) -> list[str]:
    """Return the argv of `data_prep dedup`."""
    arguments = [
        "dedup",
        "--input",
        str(corpus),
        "--output",
        str(output),
        "--workers",
        str(workers),
    ]
    return [sys.executable, "-m", "data_prep", *arguments, *more]


def found_pairs(
    corpus: Path, work: Path, peer_seconds: float
) -> dict[str, tuple[set[tuple[int, int]], float]]:
    """Return {contender: (pairs it calls duplicates, seconds in one process)}.

    Args:
        peer_seconds: time limit for datatrove, which is then left out.
    """
    from data_prep.read.stage_files import read_records

    found = {}
    seconds = timed(dedup_command(corpus, work / "ours", 1))
    notes = read_records(work / "ours" / "duplicates.jsonl.zst")
    pairs = {(min(note["id"], note["kept"]), max(note["id"], note["kept"])) for note in notes}
    found["data_prep dedup"] = pairs, seconds
    seconds = timed([sys.executable, "-c", DATASKETCH, str(corpus), str(work / "pairs.json")])
    pairs = {(one, two) for one, two in json.loads((work / "pairs.json").read_text())}
    found["datasketch"] = pairs, seconds
    try:
        seconds = timed([sys.executable, "-c", DATATROVE, str(corpus), str(work)], peer_seconds)
    except subprocess.TimeoutExpired:
        print(f"datatrove was stopped after {peer_seconds:,.0f} s.\n", flush=True)
        return found
    pairs = set()
    for path in (work / "buckets").glob("*.dups"):
        for _, one, _, two in struct.iter_unpack("<4I", path.read_bytes()):
            pairs.add((min(one, two), max(one, two)))
    found["datatrove"] = pairs, seconds
    return found


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


def keep_by_brute_force(texts: list[str]) -> list[int]:
    """Return the documents to keep: no copies of earlier ones, and none near a kept one."""
    similar: dict[int, list[int]] = {}
    for (one, two), similarity in all_similarities(texts).items():
        if similarity >= THRESHOLD:
            similar.setdefault(two, []).append(one)
    seen: set[str] = set()
    kept: set[int] = set()
    for number, text in enumerate(texts):
        if text not in seen and kept.isdisjoint(similar.get(number, ())):
            kept.add(number)
        seen.add(text)
    return sorted(kept)


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


def kept_ids(output: Path) -> list[int]:
    """Return the ids of the documents of a stage, in order."""
    from data_prep.read.stage_files import read_records, read_stage

    return [record["id"] for path in read_stage(output).paths for record in read_records(path)]


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


MEASURE = """
import resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - start, usage.ru_maxrss / 1024)
sys.exit(code)
"""


def measured(command: list[str]) -> tuple[float, float]:
    """Return (seconds of a command, peak MiB of its largest process)."""
    measuring = [sys.executable, "-c", MEASURE, *command]
    result = subprocess.run(measuring, capture_output=True, text=True, timeout=3600)
    if result.returncode:
        raise SystemExit(result.stderr)
    seconds, peak = map(float, result.stdout.split())
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
