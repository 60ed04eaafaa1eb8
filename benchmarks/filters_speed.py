"""Speed of the filters, compared with datatrove's own on the same documents.

    python benchmarks/filters_speed.py [--megabytes 8] [--rounds 3]

Documents are the text of Python's standard library, split at 4,000 characters. Each filter runs
alone, and all in one pipeline, in one process. The table has medians of CPU seconds over
interleaved rounds. "Cold" starts with empty caches. "Warm" has processed the documents before,
which a long task comes close to. The results of both must be equal.
"""

import argparse
import platform
import statistics
import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import get_filter_result
from datatrove.utils.text import split_into_parts
from datatrove.utils.word_tokenizers import load_word_tokenizer

from data_prep.filters.build import build_filters

CLASSES = {
    "gopher_quality": GopherQualityFilter,
    "gopher_repetition": GopherRepetitionFilter,
    "c4_quality": C4QualityFilter,
    "fineweb_quality": FineWebQualityFilter,
}
CHARACTERS = 4000


def documents(num_bytes: int) -> list[str]:
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        for start in range(0, len(text), CHARACTERS):
            found.append(text[start : start + CHARACTERS])
            size += len(found[-1].encode())
            if size >= num_bytes:
                return found
    return found


def theirs(names: list[str], texts: list[str]) -> tuple[float, list[str]]:
    vars(load_word_tokenizer("en")).pop("word_tokenize", None)
    split_into_parts.cache_clear()
    steps = [(name, CLASSES[name]()) for name in names]
    verdicts = []
    start = time.process_time()
    for text in texts:
        document, verdict = Document(text=text, id=""), ""
        for name, step in steps:
            try:
                kept, reason = get_filter_result(step.filter(document))
            except ZeroDivisionError:
                kept, reason = False, "nothing_to_count"
            if not kept:
                verdict = f"{name}.{reason}"
                break
        verdicts.append(verdict)
    return time.process_time() - start, verdicts


def ours(names: list[str], texts: list[str], warm: bool) -> tuple[float, list[str]]:
    vars(load_word_tokenizer("en")).pop("word_tokenize", None)
    split_into_parts.cache_clear()
    filters = build_filters([{"filter": name} for name in names])
    if warm:
        for text in texts:
            filters.apply(text, "", {})
        split_into_parts.cache_clear()
    start = time.process_time()
    verdicts = [filters.apply(text, "", {}).reason for text in texts]
    return time.process_time() - start, verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = documents(int(options.megabytes * 1e6))
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {size:,.1f} MB; Python {platform.python_version()}")
    load_word_tokenizer("en").word_tokenize("to load the rules")
    print(
        "| filters | datatrove MB/s | ours cold MB/s | ours warm MB/s | ratio cold | ratio warm |"
    )
    print("|---|---|---|---|---|---|")
    for names in [*([name] for name in CLASSES), list(CLASSES)]:
        seconds: dict[str, list[float]] = {"theirs": [], "cold": [], "warm": []}
        expected: list[str] = []
        for _ in range(options.rounds):
            for kind in seconds:
                if kind == "theirs":
                    spent, verdicts = theirs(names, texts)
                else:
                    spent, verdicts = ours(names, texts, kind == "warm")
                seconds[kind].append(spent)
                expected = verdicts if kind == "theirs" else expected
                assert verdicts == expected, f"{names}: the results differ"
        rates = {kind: size / statistics.median(each) for kind, each in seconds.items()}
        label = names[0] if len(names) == 1 else "all four"
        print(
            f"| {label} | {rates['theirs']:.2f} | {rates['cold']:.2f} | {rates['warm']:.2f} "
            f"| {rates['cold'] / rates['theirs']:.1f} | {rates['warm'] / rates['theirs']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
