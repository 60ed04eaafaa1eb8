"""The demo corpus: real text, each sentence in only one of the two sources."""

import ast
import json

import pytest

from launch.demo import corpus

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


def test_docstrings_are_removed_from_the_code_and_returned_in_file_order():
    code, docstrings = corpus.split_docstrings(SOURCE)
    assert docstrings == ["Module.", "Class,\n    two lines.", "Method.", "Only a docstring."]
    assert "not a docstring" in code and "def short(self)" in code and "\x0c" in code
    for text in docstrings:
        assert text not in code


def test_only_docstrings_are_removed_from_a_library_module():
    source = corpus.read_source(next(p for p in corpus.source_files() if p.stem == "ast"))
    code, docstrings = corpus.split_docstrings(source)
    assert docstrings[0] == ast.get_docstring(ast.parse(source), clean=False)
    removed = set(source.split("\n")) - set(code.split("\n"))
    text = "\n".join(docstrings)
    for line in removed:
        assert line.strip().strip('r"').strip() in text


def test_a_source_that_does_not_parse_is_unchanged():
    assert corpus.split_docstrings("def (:\n") == ("def (:\n", [])


@pytest.mark.soak
def test_both_sources_have_millions_of_characters(tmp_path, capsys):
    corpus.write_corpus(tmp_path)
    capsys.readouterr()
    for source, min_characters in (("code", 5_000_000), ("prose", 1_000_000)):
        lines = (tmp_path / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()
        documents = [json.loads(line) for line in lines]
        assert sum(len(document["text"]) for document in documents) > min_characters
        names = [document["name"] for document in documents]
        assert len(set(names)) == len(names)
        assert not any("site-packages" in name for name in names)
