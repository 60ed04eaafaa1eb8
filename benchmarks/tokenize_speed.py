"""How fast is `data_prep tokenize`? Against the library that it calls, on the same text and cores.

    python -m benchmarks.tokenize_speed [--text_mb 60] [--pairs 5] [--workers 2]

The reference is the least that anyone could do with `tokenizers`: one process that reads the
documents, runs `encode_batch_fast` with its own threads on as many cores, and writes the ids once.
Both commands run in turn, in pairs, each in a new process and with start-up included; the figure
is the median over the pairs of the ratio of their rates, since that of a loaded machine drifts.
The text is Python's standard library, repeated.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

VOCAB_SIZE = 32_000

REFERENCE = """
import json, os, sys
import numpy
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[2] + "/tokenizer.json")
eos = tokenizer.token_to_id("<|endoftext|>")
with open(sys.argv[1], encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]
with open(sys.argv[3], "wb") as file:
    for start in range(0, len(texts), 1024):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 1024], add_special_tokens=False):
            file.write(numpy.array(encoding.ids + [eos], numpy.uint16).tobytes())
    file.flush()
    os.fsync(file.fileno())
"""  # noqa: E501


def write_corpus(path: Path, text_bytes: int) -> int:
    """Write the standard library's sources, repeated, as JSON lines; return the bytes of text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if "site-packages" not in file.parts)
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # a test of encodings
    written = 0
    with open(path, "w", encoding="utf-8") as output:
        while True:
            for text in filter(None, texts):
                output.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= text_bytes:
                    return written


def run_timed(command: list[str], **environment: str) -> tuple[float, float]:
    """Return the wall and the CPU seconds of a command and its processes, start-up included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(
        command,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        timeout=3600,
    )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(
    directory: Path, workers: int, pairs: int
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return (wall, CPU) seconds of the reference and of data_prep for each pair."""
    corpus, tokenizer = str(directory / "corpus.jsonl"), str(directory / "tokenizer")
    seconds = []
    for number in range(pairs):
        shards, raw = directory / f"shards-{number}", directory / "raw.bin"
        reference = [sys.executable, "-c", REFERENCE, corpus, tokenizer, str(raw)]
        ours = [
            *(sys.executable, "-m", "data_prep", "tokenize", "--input", corpus),
            *("--tokenizer", tokenizer, "--output", str(shards), "--workers", str(workers)),
        ]
        threads = {"RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
        steps = [
            lambda command=reference, threads=threads: run_timed(command, **threads),
            lambda command=ours: run_timed(command),
        ]
        order = (0, 1) if number % 2 == 0 else (1, 0)  # whoever is first is not always the same
        timed = {which: steps[which]() for which in order}
        seconds.append((timed[0], timed[1]))
        print(f"pair {number}: raw {timed[0][0]:.1f} s, data_prep {timed[1][0]:.1f} s", flush=True)
        if raw.read_bytes() != (shards / "shard-00000.bin").read_bytes():
            raise SystemExit("the two wrote different ids: the comparison is void")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text_mb", type=float, default=60)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        text_bytes = write_corpus(directory / "corpus.jsonl", int(options.text_mb * 1e6))
        sample = directory / "sample.jsonl"
        write_corpus(sample, min(text_bytes, 32_000_000))
        subprocess.run(
            [
                *(sys.executable, "-m", "data_prep", "train-tokenizer", "--input", str(sample)),
                *("--vocab_size", str(VOCAB_SIZE), "--output", str(directory / "tokenizer")),
            ],
            check=True,
            capture_output=True,
            timeout=3600,
        )
        seconds = measure(directory, options.workers, options.pairs)
    ratios = [reference[0] / mine[0] for reference, mine in seconds]
    cpu_ratios = [reference[1] / mine[1] for reference, mine in seconds]
    mb = text_bytes / 1e6
    print(f"\n{mb:.0f} MB of text, {VOCAB_SIZE:,} ids, {options.workers} cores, medians:\n")
    print("| what | seconds | MB/s | CPU seconds |")
    print("|---|---|---|---|")
    for name, runs in zip(
        ("tokenizers.encode_batch_fast", "data_prep tokenize"),
        zip(*seconds, strict=True),
        strict=True,
    ):
        wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"| {name} | {wall:.1f} | {mb / wall:.2f} | {cpu:.1f} |")
    print(f"\nratio of rates, median of {len(ratios)} pairs: {statistics.median(ratios):.3f}")
    print(f"from {min(ratios):.3f} to {max(ratios):.3f}; the goal is 0.85")
    print(f"ratio of CPU seconds, median: {statistics.median(cpu_ratios):.3f}")


if __name__ == "__main__":
    main()
