"""A format is one object: added to the list, its files are found, read and tokenized."""

import importlib.util
import subprocess
import sys

import pytest

from data_prep import formats
from data_prep.files.documents import InputRules
from data_prep.read.bad_input import summary_lines
from data_prep.read.discovery import find_inputs
from tests import ROOT
from tests.data_prep.encode.tokenized import documents_of
from tests.data_prep.read.small_inputs import find, read_resuming

MODULE = '''
"""Reads texts that an empty line separates; one that begins with `!` is bad."""

from collections import Counter

from data_prep.files.documents import Chunk, Document, Problem
from data_prep.files.inputs import END, stream_of
from data_prep.formats.format import Format


def _read(source, part, rules, chunk_bytes):
    content, start = b"".join(stream_of(source, 0, rules)), part.start
    while start < len(content):
        stop = content.find(b"\\n\\n", start) + 2
        stop = stop if stop > 1 else len(content)
        data, size = content[start:stop], stop - start
        chunk = Chunk(source.name, "paragraph", start, data, size, part.input)
        yield chunk, stop if stop < len(content) else END
        start = stop


def _parse(chunk, rules):
    if chunk.data[:1] == b"!":
        problem = Problem("loud", chunk.name, chunk.input, chunk.start, False, "is loud.")
        return [], Counter(), [problem]
    return [Document(chunk.data.decode().strip(), chunk.input, chunk.start)], Counter(), []


PARAGRAPHS = Format((".par",), _read, _parse, reasons={"loud": "texts that begin with !"})
'''
RUN = """
import sys
from data_prep import formats
from paragraphs import PARAGRAPHS
formats.FORMATS += (PARAGRAPHS,)
from data_prep.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
TEXTS = [f"text {number}\nof two lines" for number in range(40)]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    (tmp_path / "paragraphs.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("paragraphs", tmp_path / "paragraphs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, module.PARAGRAPHS))
    path = tmp_path / "corpus" / "A.PAR"
    path.parent.mkdir()
    path.write_text("\n\n".join([*TEXTS[:20], "!", *TEXTS[20:]]))
    return path


def test_a_new_format_is_found_read_and_resumed(corpus):
    rules = InputRules(on_bad_input="skip", max_bad_fraction=0.1)
    inputs = find([corpus.parent], rules)
    documents, tally = read_resuming(inputs, rules, chunk_bytes=100)
    assert [each.text for each in documents] == TEXTS
    assert tally.input_bytes == corpus.stat().st_size
    lines = "\n".join(summary_lines(inputs, tally, rules))
    assert "1 in texts that begin with !" in lines and "A.PAR:61: is loud." in lines


def test_a_new_format_is_named_where_endings_are(corpus):
    assert formats.shown_endings().endswith(", .arrow, .par")
    assert formats.help_of_endings().endswith("; .arrow; .par")
    assert find_inputs([str(corpus)], "text")[0][0].suffix == ".par"


def test_a_new_format_is_tokenized(tmp_path, corpus, tokenizer_directory):
    result = subprocess.run(
        [
            *(sys.executable, "-c", RUN, "tokenize", "--input", corpus, "--on_bad_input", "skip"),
            *("--max_bad_fraction", "0.1", "--tokenizer", tokenizer_directory),
            *("--output", tmp_path / "shards", "--workers", "2"),
        ],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    expected = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in TEXTS]
    assert documents_of(tmp_path / "shards") == expected
