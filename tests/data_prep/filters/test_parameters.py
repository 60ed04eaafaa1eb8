import pytest

from data_prep.filters.parameters import NAMES, filter_problems
from tests import ROOT

pytest.importorskip("datatrove")
pytest.importorskip("spacy")


def test_every_problem_with_filters_is_reported_at_once():
    wrong = [
        {"filter": "gopher_qualty"},
        {"filter": "gopher_quality", "min_doc_word": 3},
        {"filter": "fineweb_quality", "line_punct_thr": "high"},
        {"filter": "fineweb_quality", "language": "xx"},
        {"filter": "length", "min_words": -1},
        {"filter": "python", "function": "nowhere:f"},
        {"filter": "language"},
        {"filter": "length", "min_words": 0.5},
        {"filter": "fineweb_quality", "line_punct_thr": None},
        {"filter": "python"},
        "pii",
    ]
    problems = filter_problems(wrong, "r.json: clean.filters")
    assert len(problems) == len(wrong)
    text = "\n".join(problems)
    assert 'Did you mean "gopher_quality"?' in text
    assert 'Did you mean "min_doc_words"?' in text
    language = wrong.index({"filter": "language"})
    assert f"r.json: clean.filters[{language}] (language): needs `model`" in text


def test_null_is_allowed_where_the_filter_allows_it():
    fine = [
        {"filter": "gopher_quality", "min_doc_words": None},
        {"filter": "length", "min_words": None},
    ]
    assert filter_problems(fine, "r.json: clean.filters") == []


def test_every_filter_is_documented():
    text = (ROOT / "docs" / "data_pipeline.md").read_text(encoding="utf-8")
    assert not [name for name in NAMES if f"`{name}`" not in text]
