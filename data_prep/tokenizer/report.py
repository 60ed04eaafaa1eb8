"""Measures a tokenizer on texts: bytes per token, ids used, and tokens per word by script.

Reads no files. Independent of the command line and of encoders.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_SHOWN_TOKENS = 20
MAX_WORDS_PER_SCRIPT = 5000  # number of distinct words measured, enough for two significant digits
MIN_WORDS = 20  # minimum number of words for a script to be reported
BATCH_TEXTS = 64
# Scripts written without spaces between words; each character counts as a word.
UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"}
_WORD = re.compile(r"[^\W\d_]+")

Encode = Callable[[Sequence[str]], tuple[list[np.ndarray], np.ndarray]]  # ids, UTF-8 sizes


def measure_tokenizer(
    encode: Encode,
    vocab_size: int,
    token_texts: Mapping[int, str],
    sources: Mapping[str, list[str]],
    unknown_id: int | None,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """Measure a tokenizer on texts, and return the report.

    Args:
        token_texts: {id: text} for all tokens except special tokens.
        unknown_id: id of the unknown token, if there is one.
        decode: the inverse of `encode` for one document.
    """
    num_restored = 0
    counts = np.zeros(vocab_size, np.int64)
    by_source = {}
    for name, texts in sources.items():
        tokens = 0
        for start in range(0, len(texts), BATCH_TEXTS):
            batch = texts[start : start + BATCH_TEXTS]
            ids = encode(batch)[0]
            counts += np.bincount(np.concatenate(ids), minlength=vocab_size)
            tokens += sum(map(len, ids))
            for text, each in zip(batch, ids, strict=True):
                num_restored += decode(each.tolist()) == text
        num_bytes = sum(len(text.encode()) for text in texts)
        by_source[name] = {
            "documents": len(texts),
            "bytes": num_bytes,
            "tokens": tokens,
            "bytes_per_token": round(num_bytes / tokens, 4) if tokens else None,
        }
    num_unknown = 0 if unknown_id is None else int(counts[unknown_id])
    ids_of_text = sorted(token_texts)
    used = [number for number in ids_of_text if counts[number]]
    longest = sorted(ids_of_text, key=lambda number: (-len(token_texts[number].encode()), number))
    return {
        "vocab_size": vocab_size,
        "sources": by_source,
        "bytes_per_token": _ratio(by_source),
        "unknown": round(num_unknown / max(1, int(counts.sum())), 6),
        "restored": round(num_restored / max(1, sum(map(len, sources.values()))), 6),
        "ids_of_text": len(ids_of_text),
        "ids_used": len(used),
        "ids_unused": [number for number in ids_of_text if not counts[number]][:1000],
        "longest_tokens": [
            {"id": number, "token": token_texts[number], "count": int(counts[number])}
            for number in longest[:MAX_SHOWN_TOKENS]
        ],
        "tokens_per_word": fertility(encode, sources),
    }


def fertility(encode: Encode, sources: Mapping[str, list[str]]) -> dict[str, dict[str, float]]:
    """Return, for each script, the number of words and of tokens per word.

    Words are encoded with a leading space. In scripts that have no spaces between words, each
    character counts as a word and is encoded without a leading space.
    """
    words: dict[str, Counter[str]] = defaultdict(Counter)
    for texts in sources.values():
        for text in texts:
            for word in _WORD.findall(text):
                script = script_of(word[0])
                counts = words[script]
                for part in word if script in UNSPACED else (word,):
                    if part in counts or len(counts) < MAX_WORDS_PER_SCRIPT:
                        counts[part] += 1
    result = {}
    for script, counts in sorted(words.items(), key=lambda item: -item[1].total()):
        if counts.total() < MIN_WORDS:
            continue
        space = "" if script in UNSPACED else " "
        ids = encode([space + word for word in counts])[0]
        tokens = sum(len(each) * times for each, times in zip(ids, counts.values(), strict=True))
        result[script.lower()] = {
            "words": counts.total(),
            "tokens_per_word": round(tokens / counts.total(), 3),
        }
    return result


def script_of(character: str) -> str:
    """Return the first word of a character's Unicode name, which for letters is the script."""
    return unicodedata.name(character, "UNKNOWN").split()[0].split("-")[0]


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Format a report as lines to print."""
    lines = [
        f"bytes/token {each['bytes_per_token'] or 0:.3f}  {name} ({each['documents']:,} documents,"
        f" {each['bytes'] / 1e6:,.1f} MB)"
        for name, each in report["sources"].items()
    ]
    lines.append(f"unknown {report['unknown']:.2%} of the tokens")
    lines.append(f"restored {report['restored']:.1%} of the documents by decoding")
    text_ids = report["ids_of_text"]
    lines.append(
        f"used        {report['ids_used']:,} of {text_ids:,} text ids "
        f"({report['ids_used'] / max(1, text_ids):.1%})"
    )
    shown = ", ".join(repr(each["token"][:40]) for each in report["longest_tokens"][:5])
    lines.append(f"longest     {shown}")
    for script, each in list(report["tokens_per_word"].items())[:6]:
        lines.append(f"tokens/word {each['tokens_per_word']:.2f}  {script}")
    return lines


def comparison_rows(reports: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a table that compares reports, with a header row and one row per statistic."""
    columns = list(reports.values())
    rows = [["", *reports], ["vocabulary", *(f"{each['vocab_size']:,}" for each in columns)]]
    rows.append(["bytes/token", *(f"{each['bytes_per_token']:.3f}" for each in columns)])
    for source in columns[0]["sources"]:
        cells = (each["sources"][source]["bytes_per_token"] for each in columns)
        rows.append([f"  {source}", *("-" if cell is None else f"{cell:.3f}" for cell in cells)])
    rows.append(["unknown tokens", *(f"{each['unknown']:.2%}" for each in columns)])
    rows.append(["restored", *(f"{each['restored']:.1%}" for each in columns)])
    shares = (each["ids_used"] / max(1, each["ids_of_text"]) for each in columns)
    rows.append(["ids used", *(f"{share:.1%}" for share in shares)])
    rows.append(["tokens/word", *("" for _ in columns)])
    for script in columns[0]["tokens_per_word"]:
        cells = (each["tokens_per_word"][script]["tokens_per_word"] for each in columns)
        rows.append([f"  {script}", *(f"{cell:.2f}" for cell in cells)])
    rows.append(["encoder", *(each["encoder"] for each in columns)])
    rows.append(["MB/s, 1 core", *(f"{each['megabytes_per_second']:.1f}" for each in columns)])
    return rows


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format a table as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not number else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _ratio(sources: Mapping[str, Mapping[str, Any]]) -> float:
    tokens = sum(each["tokens"] for each in sources.values())
    return round(sum(each["bytes"] for each in sources.values()) / max(1, tokens), 4)
