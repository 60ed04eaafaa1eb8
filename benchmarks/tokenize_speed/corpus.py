"""Real text to tokenize: the code and documentation on this machine, without duplicates."""

import hashlib
import json
import os
import sysconfig
from pathlib import Path

from benchmarks.tokenize_speed.tools import EOS

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".html", ".pm", ".pl", ".h", ".c", ".cpp", ".js"}


def write_corpus(directory: Path, text_bytes: int, parts: int) -> tuple[int, int]:
    """Write corpus-<n>.jsonl, consecutive parts of one order; return (documents, bytes of text)."""
    paths = sysconfig.get_paths()
    found = []
    for top in (paths["stdlib"], paths["purelib"], "/usr/share", "/usr/include", "/usr/lib"):
        for base, _, names in os.walk(top):
            files = (Path(base) / name for name in names if Path(name).suffix in SUFFIXES)
            found += [file for file in files if not file.is_symlink()]
    found = sorted(set(found), key=lambda path: hashlib.md5(str(path).encode()).digest())
    texts, seen, size = [], set(), 0
    for path in found:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        digest = hashlib.md5(text.encode()).digest()
        if digest in seen or not 200 < len(text) < 1_000_000 or EOS in text:
            continue
        seen.add(digest)
        texts.append(text)
        size += len(text.encode())
        if size >= text_bytes:
            break
    done, number = 0, 0
    outputs = [open(directory / f"corpus-{part}.jsonl", "w") for part in range(parts)]
    for text in texts:
        outputs[number].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        done += len(text.encode())
        number = min(parts - 1, done * parts // size)
    for output in outputs:
        output.close()
    return len(texts), size
