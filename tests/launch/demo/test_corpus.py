"""launch/demo_corpus.py: real text, each sentence in one of the two sources only."""

import ast
import json

from launch import demo_corpus

SOURCE = '''"""Module."""
import os


class A:
    """Class,
    two lines."""

    def method(self):
        """Method."""
        return "not a docstring"

    def short(self): "kept with its line"
\x0c

async def coroutine():
    """Only a docstring."""
'''


def test_docstrings_leave_the_code_in_the_order_of_the_file():
    code, docstrings = demo_corpus.split_docstrings(SOURCE)
    assert docstrings == ["Module.", "Class,\n    two lines.", "Method.", "Only a docstring."]
    assert "not a docstring" in code and "def short(self)" in code and "\x0c" in code
    for text in docstrings:
        assert text not in code


def test_code_of_the_library_loses_docstrings_and_nothing_else():
    """A parsed module without its docstrings is what remains, for a real module."""
    source = demo_corpus.read_source(next(p for p in demo_corpus.source_files() if p.stem == "ast"))
    code, docstrings = demo_corpus.split_docstrings(source)
    assert docstrings[0] == ast.get_docstring(ast.parse(source), clean=False)
    removed = set(source.split("\n")) - set(code.split("\n"))
    text = "\n".join(docstrings)
    for line in removed:
        assert line.strip().strip('r"').strip() in text


def test_a_source_that_does_not_parse_stays_whole():
    assert demo_corpus.split_docstrings("def (:\n") == ("def (:\n", [])


def test_the_library_has_millions_of_characters_in_both_sources(tmp_path, capsys):
    demo_corpus.write_corpus(tmp_path)
    capsys.readouterr()
    for source, least_characters in (("code", 5_000_000), ("prose", 1_000_000)):
        lines = (tmp_path / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()
        documents = [json.loads(line) for line in lines]
        assert sum(len(document["text"]) for document in documents) > least_characters
        names = [document["name"] for document in documents]
        assert len(set(names)) == len(names)
        assert not any("site-packages" in name for name in names)
