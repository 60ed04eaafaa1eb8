"""Reports on tokenizers, and samples of text, against counts made by hand."""

import json
import random
import re

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.tokenizer.report import fertility, measure_tokenizer
from tests.data_prep.small_corpus import data_prep, write_jsonl


def by_character(texts):
    ids = [np.array([ord(one) % 100 for one in text], np.int64) for text in texts]
    return ids, np.array([len(text.encode()) for text in texts])


def test_figures_equal_counts_by_hand():
    spellings = {number: "x" * (number % 7 + 1) for number in range(1, 100)}
    sources = {"one": ["abc", "é"], "two": ["", "aa" * 50], "none": []}
    unknown = ord("b") % 100
    report = measure_tokenizer(
        by_character, 100, spellings, sources, unknown, lambda ids: "".join(map(chr, ids))
    )
    assert report["unknown"] == round(1 / 104, 6)
    assert report["restored"] == 3 / 4, "the id of é is folded"
    assert report["sources"]["one"] == {
        "documents": 2, "bytes": 5, "tokens": 4, "bytes_per_token": 1.25,
    }  # fmt: skip
    assert report["sources"]["two"]["bytes_per_token"] == 1.0
    assert report["sources"]["none"]["bytes_per_token"] is None
    used = {ord(one) % 100 for one in "abcé"}
    assert report["ids_used"] == len(used) and report["ids_of_text"] == 99
    assert set(report["ids_unused"]) == set(range(1, 100)) - used
    assert all(len(each["token"]) == 7 for each in report["longest_tokens"][:10])
    assert report["bytes_per_token"] == round(105 / 104, 4)


def test_unknown_tokens_are_shown_and_a_text_that_they_would_lose_is_refused(tmp_path):
    known = ["<|endoftext|>", "[UNK]", "one", "two"]
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(known)}, "[UNK]")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=library, eos_token=known[0]).save_pretrained(
        tmp_path / "words"
    )
    write_jsonl(tmp_path / "a.jsonl", ["one two", "one zwei", "one two one"])
    inputs = ("--input", tmp_path / "a.jsonl", "--tokenizer", tmp_path / "words")
    compared = data_prep("compare-tokenizers", *inputs)
    assert re.search(r"unknown tokens +14\.29%", compared.stdout), compared.stdout + compared.stderr
    assert re.search(r"restored +66\.7%", compared.stdout), compared.stdout
    command = ("tokenize", *inputs, "--output", tmp_path / "s")
    refused = data_prep(*command)
    assert refused.returncode == 2 and "10.0% of the tokens are its unknown token" in refused.stderr
    accepted = data_prep(*command, "--max_unknown", "0.2")
    assert accepted.returncode == 0, accepted.stderr
    assert "1 tokens (10.00%) are the tokenizer's unknown token" in accepted.stdout
    assert json.loads((tmp_path / "s" / "manifest.json").read_text())["unknown_ids"] == 1


def test_words_are_counted_by_script():
    text = "one two three " * 10 + "раз два " * 15 + "你好世界" * 10
    found = fertility(by_character, {"all": [text]})
    assert found["latin"] == {"words": 30, "tokens_per_word": round((4 + 4 + 6) / 3, 3)}
    assert found["cyrillic"] == {"words": 30, "tokens_per_word": 4.0}
    assert found["cjk"] == {"words": 40, "tokens_per_word": 1.0}


def test_commands_train_on_a_sample_and_compare(tmp_path):
    rng = random.Random(2)
    words = ["alpha", "beta", "gamma", "délta", "12345", "don't"]
    for name, count in (("big", 3000), ("small", 1000)):
        texts = [" ".join(rng.choices(words, k=20)) + f" {name}{n}" for n in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    inputs = ["--input", tmp_path / "big.jsonl", tmp_path / "small.jsonl"]
    trained = ("train-tokenizer", *inputs, "--vocab-size", "300", "--sample-bytes", "1e5")
    for name in ("a", "again"):
        result = data_prep(*trained, "--output", tmp_path / name, "--special-tokens", "<|user|>")
        assert result.returncode == 0, result.stderr
    assert "sampled     from 4,000 documents" in result.stdout
    for file in ("tokenizer.json", "tokenizer_config.json", "report.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    big, small = report["sources"].values()
    assert 70_000 < big["bytes"] < 80_000 and 20_000 < small["bytes"] < 27_000
    assert data_prep(
        *("train-tokenizer", *inputs, "--vocab_size", "280", "--split", "llama3"),
        *("--output", tmp_path / "b"),
    ).returncode == 0  # fmt: skip
    result = data_prep(
        *("compare-tokenizers", *inputs, "--tokenizer", tmp_path / "a"),
        *("--tokenizer", tmp_path / "b", "--output", tmp_path / "c.json"),
    )
    assert result.returncode == 0, result.stderr
    compared = json.loads((tmp_path / "c.json").read_text())
    for name in ("a", "b"):
        library = tokenizers.Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        lines = (tmp_path / "big.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        tokens = sum(len(each.ids) for each in library.encode_batch(texts))
        found = compared[str(tmp_path / name)]["sources"][str(tmp_path / "big.jsonl")]
        assert (found["documents"], found["tokens"]) == (3000, tokens)
    assert "bytes/token" in result.stdout and "tokens/word" in result.stdout
