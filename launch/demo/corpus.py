"""Write the corpus of launch/demo.sh from text that every Python installation contains.

    python -m launch.demo.corpus OUTPUT

writes two sources that have no sentence in common. OUTPUT/code.jsonl contains the standard
library's source files without their docstrings, one document per file. OUTPUT/prose.jsonl contains
the docstrings and the manual topics that `help()` shows.
"""

import argparse
import ast
import json
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from zerolm.common import interrupts

MIN_DOCUMENT_CHARACTERS = 200  # an empty __init__.py teaches nothing


def source_files() -> list[Path]:
    """Return the sorted .py files of the standard library, excluding its tests.

    The tests make up more than half of its text, and many installations omit them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "__pycache__", "pydoc_data", "test", "tests"}
    return sorted(
        path for path in root.rglob("*.py") if excluded.isdisjoint(path.relative_to(root).parts)
    )


def read_source(path: Path) -> str | None:
    """Return a file's text, decoded with its declared encoding; None if decoding fails."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None


def split_docstrings(source: str) -> tuple[str, list[str]]:
    """Return (source without docstrings, its docstrings in file order).

    If this Python version cannot parse the source, return it unchanged with an empty list.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source, []
    statements = sorted(docstring_statements(tree), key=lambda statement: statement.lineno)
    lines: list[str | None] = list(source.split("\n"))  # splitlines() also splits at form feeds
    docstrings = []
    for statement in statements:
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        if (lines[first] or "")[: statement.col_offset].strip():
            continue  # keep `def f(): "..."` on one line
        docstrings.append(ast.literal_eval(statement.value))
        lines[first:last] = [""] + [None] * (last - first - 1)
    return "\n".join(line for line in lines if line is not None), docstrings


def docstring_statements(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yield the docstring statement of each module, class and function."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False):
            assert isinstance(node.body[0], ast.Expr)
            yield node.body[0]


def manual_topics() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each topic in Python's manual that `help()` shows."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a separate package in some Linux distributions
        return
    yield from sorted(topics.items())


def write_corpus(output: Path) -> None:
    """Write both files of the corpus and print their sizes."""
    output.mkdir(parents=True, exist_ok=True)
    root = Path(sysconfig.get_paths()["stdlib"])
    num_documents = {"code": 0, "prose": 0}
    with (
        open(output / "code.jsonl", "w", encoding="utf-8") as code,
        open(output / "prose.jsonl", "w", encoding="utf-8") as prose,
    ):
        files = {"code": code, "prose": prose}

        def write(source: str, name: str, text: str) -> None:
            if len(text) >= MIN_DOCUMENT_CHARACTERS:
                text = text.encode("utf-8", "replace").decode("utf-8")  # replaces lone surrogates
                files[source].write(json.dumps({"name": name, "text": text}) + "\n")
                num_documents[source] += 1

        for path in source_files():
            text = read_source(path)
            if text is not None:
                name = path.relative_to(root).as_posix()
                stripped, docstrings = split_docstrings(text)
                write("code", name, stripped)
                write("prose", name, "\n\n".join(docstrings))
        for name, text in manual_topics():
            write("prose", name, text)
    for source, count in num_documents.items():
        size = (output / f"{source}.jsonl").stat().st_size
        print(f"{output / source}.jsonl: {count:,} documents, {size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.corpus", description="Write the corpus of launch/demo.sh."
    )
    parser.add_argument(
        "output", type=Path, help="directory to write code.jsonl and prose.jsonl to"
    )
    write_corpus(parser.parse_args().output)


if __name__ == "__main__":
    interrupts.end_on_interrupt()
    main()
