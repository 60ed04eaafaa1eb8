"""Scores of fastText, compared with datatrove, and thresholds on numbers."""

import random
from pathlib import Path

import pytest

from data_prep.filters.build import build_filters
from data_prep.filters.parameters import filter_problems
from zerolm.common.errors import ConfigError

GOOD, BAD = "the house of the old dog is here", "buy cheap pills now click click"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return train_model(tmp_path_factory.mktemp("model") / "quality.v1.bin")


def train_model(path: Path) -> Path:
    """Train a classifier of two labels, hq and lq."""
    fasttext = pytest.importorskip("fasttext")
    data = path.with_suffix(".txt")
    data.write_text(f"__label__hq {GOOD}\n__label__lq {BAD}\n" * 50)
    # With fewer than 11 threads some weights stay uninitialised: test_filters.py says why.
    model = fasttext.train_supervised(str(data), epoch=5, lr=0.5, dim=8, thread=11, verbose=0)
    model.save_model(str(path))
    return path


def texts() -> list[str]:
    generator = random.Random(2)
    words = f"{GOOD} {BAD}".split()
    lines = [" ".join(generator.choices(words, k=8)) for _ in range(60)]
    return [*lines, GOOD, BAD, "", "unknown\n\nwords", f"{GOOD}\n\n{BAD}"]


@pytest.mark.parametrize(
    "labels",
    [{"keep_labels": [["hq", 0.5]]}, {"remove_labels": [["lq", 0.9]]}, {}],
    ids=["keep", "remove", "score"],
)
@pytest.mark.parametrize("mode", ["DOCUMENT", "PARAGRAPH"])
def test_decisions_and_scores_equal_those_of_datatrove(model, labels, mode):
    from datatrove.data import Document
    from datatrove.pipeline.filters.fasttext_filter import FastTextClassifierFilter

    pairs = {key: [tuple(pair) for pair in value] for key, value in labels.items()}
    # Without labels datatrove adds None to a list, so it gets an empty one.
    theirs = FastTextClassifierFilter(
        str(model), filter_mode=mode, **(pairs or {"remove_labels": []})
    )
    given = {"filter": "fasttext", "model": str(model), "filter_mode": mode, "name": "q", **labels}
    assert filter_problems([given], "r") == []
    filters = build_filters([given])
    kept = 0
    for text in texts():
        document = Document(text=text, id="0")
        expected = theirs.filter(document)
        result = filters.apply(text, "0", {"scores": {"before": 1}})
        scores = {f"q.{key[9:]}": value for key, value in document.metadata.items()}
        assert result.added == {"scores": {"before": 1, **scores}}
        assert result.kept == expected and result.reason == ("" if expected else "fasttext.q")
        assert result.text == (document.text if expected else text)
        kept += expected
    assert 0 < kept < len(texts()) or not labels


def test_a_label_that_a_model_lacks_is_refused_with_those_it_has(model, tmp_path):
    given = {"filter": "fasttext", "model": str(model), "keep_labels": [["high", 0.5]]}
    with pytest.raises(ConfigError, match=r"has no label high\. It has (hq, lq|lq, hq)"):
        build_filters([given])
    (tmp_path / "bad.bin").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"bad\.bin"):
        build_filters([{"filter": "fasttext", "model": str(tmp_path / "bad.bin")}])


def test_a_threshold_needs_only_the_number():
    given = {"filter": "score", "key": "scores.q.hq", "min": 0.25, "max": 0.75}
    filters = build_filters([given])
    cases = {0.24: "too_low", 0.25: "", 0.75: "", 0.76: "too_high", float("nan"): "too_low"}
    for value, reason in cases.items():
        expected = f"score.scores.q.hq.{reason}" if reason else ""
        assert filters.apply("x", "0", {"scores": {"q.hq": value}}).reason == expected
        assert filters.apply("x", "0", {"scores": {"q": {"hq": value}}}).reason == expected
    for missing in ({}, {"scores": None}, {"scores": {"q.hq": "0.5"}}, {"scores": {"q.hq": True}}):
        assert filters.apply("x", "0", missing).reason == "score.scores.q.hq.missing"
        assert build_filters([{**given, "missing": "keep"}]).apply("x", "0", missing).kept


def test_wrong_parameters_are_refused_together(tmp_path):
    problems = filter_problems(
        [
            {"filter": "fasttext", "model": str(tmp_path / "none.bin"), "keep_labels": ["hq", 0.5]},
            {"filter": "fasttext", "model_url": "https://example.org/model.bin"},
            {"filter": "score", "key": "a", "min": 2, "max": 1},
            {"filter": "score", "min": 2, "missing": "skip"},
            {"filter": "score", "key": "a"},
        ],
        "r.json: clean.filters",
    )
    wanted = [
        "none.bin: no such file", "is not a list of [label, threshold", "'model_url' is not",
        "above max, 1", "needs `key`", "missing: 'skip'", "needs `min` or `max`",
    ]  # fmt: skip
    assert [text for text in wanted if not any(text in line for line in problems)] == []
