"""`python -m data_prep train-tokenizer`, and how flags are written."""

import pytest
from small_corpus import TEXTS, data_prep, write_jsonl
from transformers import AutoTokenizer

from data_prep.command_line import Problems, parse
from zerolm.errors import ConfigError


def test_flags_have_underscores_or_dashes_and_lists_may_be_repeated():
    words = ["train-tokenizer", "--input", "a-b", "c", "--input=d-e", "--output", "o"]
    one = parse([*words, "--vocab_size", "300", "--text_field", "x-y"])
    two = parse([*words, "--vocab-size=300", "--text-field=x-y"])
    assert one == two and one.input == ["a-b", "c", "d-e"] and one.text_field == "x-y"


@pytest.mark.parametrize("text", ["12", "1.2e1", "12.0"])
def test_whole_numbers_may_be_written_like_floats(text):
    problems = Problems()
    assert problems.number("n", text, 1) == 12 and problems.lines == []


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1.5", "0", "101"])
def test_what_is_no_whole_number_in_the_limits_is_refused(text):
    problems = Problems()
    problems.number("n", text, 1, 100)
    assert problems.lines == [f"--n {text}: is not a whole number from 1 to 100."]


def test_unknown_flags_are_all_listed():
    with pytest.raises(ConfigError) as caught:
        parse(["verify", "s", "--quick", "--sead=1"])
    assert len(caught.value.problems) == 2


def test_train_tokenizer_writes_what_transformers_loads(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, ""])
    command = ("train-tokenizer", "--input", tmp_path / "a.jsonl", "--output", tmp_path / "t")
    result = data_prep(*command, "--vocab_size", 290)
    assert result.returncode == 0, result.stderr
    assert "290 ids" in result.stdout and "7 documents" in result.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert len(tokenizer) == 290 and tokenizer.eos_token_id == 0
    again = data_prep(*command, "--vocab_size", 290)
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_train_tokenizer_says_when_the_vocabulary_stays_smaller(tmp_path):
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
def test_train_tokenizer_refuses_what_it_cannot_read(tmp_path, content, named):
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
    lines = result.stderr.splitlines()
    assert result.returncode == 2 and len(lines) == 3
    assert lines[0].startswith("--vocab_size 256: is not a whole number from 257 to")
