"""`python -m data_prep train-tokenizer`, and how its numbers are written."""

import pytest
from transformers import AutoTokenizer

from data_prep.cli.problems import Problems
from tests.data_prep.small_corpus import TEXTS, data_prep, write_jsonl


@pytest.mark.parametrize("text", ["12000", "1.2e4", "12000.0", "12k", "0.012M"])
def test_whole_numbers_may_be_written_in_any_form(text):
    problems = Problems()
    assert problems.number("n", text, 1) == 12_000 and problems.lines == []
    assert problems.size("n", text, 1) == 12_000 and problems.lines == []


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1.5", "0", "101"])
def test_numbers_outside_the_limits_or_not_whole_are_refused(text):
    problems = Problems()
    problems.number("n", text, 1, 100)
    assert problems.lines == [f"--n {text}: is not a whole number from 1 to 100."]


def test_train_tokenizer_writes_a_tokenizer_that_transformers_loads(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, ""])
    command = ("train-tokenizer", "--input", tmp_path / "a.jsonl", "--output", tmp_path / "t")
    result = data_prep(*command, "--vocab_size", 290)
    assert result.returncode == 0, result.stderr
    assert "290 ids" in result.stdout and "7 documents" in result.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert len(tokenizer) == 290 and tokenizer.eos_token_id == 0
    again = data_prep(*command, "--vocab_size", 290)
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_train_tokenizer_reports_a_vocabulary_smaller_than_requested(tmp_path):
    (tmp_path / "a.txt").write_text("ab ab")
    result = data_prep(
        *("train-tokenizer", "--input", tmp_path / "a.txt", "--output", tmp_path / "t"),
        *("--vocab_size", 5000),
    )
    assert result.returncode == 0 and "--vocab_size 5,000 was not reached" in result.stdout


@pytest.mark.parametrize(
    ("content", "named"),
    [(b'{"text": "a"}\nx\n', ":2: not valid JSON"), (b'{"text": ""}\n', "no documents to train")],
)
def test_train_tokenizer_refuses_unreadable_input(tmp_path, content, named):
    (tmp_path / "a.jsonl").write_bytes(content)
    result = data_prep(
        *("train-tokenizer", "--input", tmp_path / "a.jsonl", "--output", tmp_path / "t"),
        *("--vocab_size", 300),
    )
    assert result.returncode == 2 and named in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "t").exists()


def test_train_tokenizer_shows_every_problem(tmp_path):
    (tmp_path / "file").write_text("")
    result = data_prep(
        *("train-tokenizer", "--input", tmp_path / "absent", "--output", tmp_path / "file"),
        *("--vocab_size", 256),
    )
    first, *lines = result.stderr.splitlines()
    assert result.returncode == 2 and len(lines) == 3
    assert first == "python -m data_prep train-tokenizer: refused"
    assert lines[0].startswith("--vocab_size 256: is not a whole number from 257 to")


def test_inputs_with_different_text_fields_train_one_tokenizer(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", TEXTS)
    other = tmp_path / "other.jsonl"
    other.write_text(one.read_text().replace('"text"', '"body"'))
    command = ["train-tokenizer", "--input", one, other, "--vocab_size", 290]
    result = data_prep(*command, "--output", tmp_path / "t", "--text_field_of", f"{other}=body")
    assert result.returncode == 0 and "14 documents" in result.stdout, result.stderr
    refused = data_prep(*command, "--output", tmp_path / "u", "--text_field_of", "body")
    assert refused.returncode == 2
    assert f"--text_field_of body: is not INPUT=FIELD with a value of --input: {one}" in (
        refused.stderr
    )
