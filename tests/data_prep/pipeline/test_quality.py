"""Tagging and thresholds without models, compared with brute force."""

import json
import random
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.stages.counts import score_bin
from tests.data_prep.filters.test_score_filters import BAD, GOOD, train_model
from tests.data_prep.stage_cases import documents_of


@pytest.fixture
def recipe(tmp_path, tokenizer_directory) -> Path:
    generator = random.Random(3)
    words = f"{GOOD} {BAD}".split()
    records = []
    for number in range(300):
        text = " ".join(generator.choices(words, k=generator.randrange(3, 60)))
        host = f"{generator.choice(['www.', ''])}site{generator.randrange(5)}.org"
        url = {"url": f"https://{host}/{number}"} if number % 11 else {}
        language = {"meta": {"lang": generator.choice(["en", "de", "日本"])}}
        records.append(
            {"id": f"d{number}", "text": text, **url, **(language if number % 3 else {})}
        )
    records += [{"id": "copy", "text": records[5]["text"], "url": "https://[bad"}]
    (tmp_path / "raw").mkdir()
    for part in range(3):
        lines = [json.dumps(record) for record in records[part * 101 : (part + 1) * 101]]
        (tmp_path / "raw" / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(tokenizer_directory, tmp_path / "tokenizer")
    train_model(tmp_path / "quality.bin")
    content = {
        "output": "out",
        "sources": {"web": {"input": ["raw/*.jsonl"]}},
        "clean": {
            "filters": [
                {"filter": "fasttext", "model": "quality.bin"},
                {"filter": "length", "min_words": 10, "tag": True},
            ],
            "unit_bytes": 20000,
        },
        "select": {
            "filters": [
                {"filter": "score", "key": "scores.quality.hq", "min": 0.4},
                {"filter": "tags", "drop": ["length"]},
            ]
        },
        "dedup": {"near": False},
        "tokenize": {"tokenizer": "tokenizer", "val_fraction": 0.2, "encoder": "tokenizers"},
    }
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(content))
    return path


def change(path: Path, key: str, **values) -> None:
    content = json.loads(path.read_text())
    content[key] = {**content[key], **values}
    path.write_text(json.dumps(content))


def test_thresholds_are_applied_to_stored_scores(recipe, capsys):
    output = recipe.parent / "out" / "web"
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    tagged = documents_of(output / "clean")
    assert len(tagged) == 301  # none is dropped
    scores = [each["scores"]["quality.hq"] for each in tagged]
    manifest = json.loads((output / "clean" / "stage.json").read_text())
    bins = manifest["scores_out"]["quality.hq"]
    assert bins == manifest["scores_in"]["quality.hq"]
    assert sum(count for count, _ in bins.values()) == 301
    expected_bins: dict = defaultdict(int)
    for score in scores:
        expected_bins[f"{np.floor(np.round(score * 100, 9)) / 100:.2f}"] += 1
    assert {low: count for low, (count, _) in bins.items()} == expected_bins
    short = [len(each["text"].split()) < 10 for each in tagged]
    assert ["length.too_few_words" in each.get("tags", ()) for each in tagged] == short
    assert manifest["tags"] == {"length.too_few_words": sum(short)}
    chosen = [
        each
        for each, score, is_short in zip(tagged, scores, short, strict=True)
        if score >= 0.4 and not is_short
    ]
    assert 20 < len(chosen) < 250
    assert documents_of(output / "select") == chosen

    page = (recipe.parent / "out" / "report.html").read_text()
    assert "quality.<wbr>hq" in page

    (recipe.parent / "quality.bin").rename(recipe.parent / "gone.bin")
    capsys.readouterr()
    assert main(["run", str(recipe), "--check"]) == 2
    assert "quality.bin: no such file" in capsys.readouterr().err
    (recipe.parent / "gone.bin").rename(recipe.parent / "quality.bin")
    filters = [{"filter": "score", "key": "scores.quality.hq", "max": 0.3}]
    change(recipe, "select", filters=filters, keep_dropped=True)
    before = (output / "clean" / "stage.json").stat().st_mtime_ns
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "web/clean: is complete" in shown and "web/select: runs again" in shown
    assert (output / "clean" / "stage.json").stat().st_mtime_ns == before  # no model was read
    assert documents_of(output / "select") == [
        each for each, score in zip(tagged, scores, strict=True) if score <= 0.3
    ]


def test_wrong_keys_of_select_are_refused(recipe, capsys):
    change(recipe, "select", unit_bytes=5)
    assert main(["run", str(recipe), "--check"]) == 2
    shown = capsys.readouterr().err
    assert "select.unit_bytes: is not an option" in shown


@pytest.mark.parametrize(
    ("value", "low"),
    [(0, "0.00"), (0.29, "0.29"), (0.999, "0.99"), (1.00001, "1.00"), (9.99, "9.9"), (123, "120"),
     (-0.005, "-0.01"), (-3.2, "-3.2"), (99999, "99000"), (float("nan"), "nan")],
)  # fmt: skip
def test_bins_start_at_or_below_the_score(value, low):
    assert score_bin(value) == low
